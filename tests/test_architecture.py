"""Holds the arrows of the package: imports point down one list, and Mosaic's internals stay behind one file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "inkling_pallas"
ROOT = Path(__file__).parent.parent / PACKAGE

# A module imports from later layers only, so the modules of one layer never import each other.
LAYERS = (
    ("__main__",),
    ("benchmark", "check_command", "context_benchmark", "demo", "report", "serve_sim", "write_benchmark"),
    ("measurement_plots",),
    ("measurements",),
    ("sheared_benchmark",),
    ("bench_options", "timed_case"),
    ("ceilings", "check", "contract", "judging", "peers", "serve_options", "serve_report"),
    ("peer_dense", "peer_libraries", "peer_paged", "peer_workers", "torch_peers"),
    ("fa4_score_mod", "peer_arrays", "peer_call", "torch_inputs"),
    ("layer_options", "results", "serving", "timing", "workloads"),
    ("goals",),
    ("phase_pictures",),
    ("phase_data", "pictures", "scheduler", "server", "synthetic"),
    ("picture_parts",),
    ("picture_data",),
    ("__init__",),
    ("sharding",),
    ("context",),
    ("attention",),
    ("call", "shearing", "write"),
    ("dispatch",),
    ("warm",),
    ("batch",),
    ("buckets",),
    ("relative",),
    ("splits",),
    ("kernels.__init__", "kernels.portable", "kernels.hopper", "kernels.blackwell"),
    ("kernels.hopper_configs",),
    ("kernels.prefill_launch", "kernels.tensor_launch"),
    (
        "kernels.combine",
        "kernels.decode",
        "kernels.listing",
        "kernels.portable_plan",
        "kernels.prefill",
        "kernels.shear",
        "kernels.tensor_copies",
        "kernels.tensor_correction",
        "kernels.tensor_products",
        "kernels.tensor_softmax",
        "kernels.write_kv",
    ),
    ("kernels.prefill_overlap", "kernels.tensor_walk"),
    ("kernels.cluster_merge", "kernels.gmem", "kernels.prefill_tiles"),
    (
        "kernels.buffers",
        "kernels.pages",
        "kernels.band",
        "kernels.epilogue",
        "kernels.prefill_buffers",
        "kernels.tensor_buffers",
    ),
    ("kernels.worklist",),
    ("kernels.schedule", "kernels.softmax"),
    ("kernels.shares",),
    ("kernels.lanes",),
    ("kernels.rows", "kernels.shear_steps", "kernels.steps", "kernels.table"),
    ("kernels.mosaic",),
    ("kernels.inline_lanes",),
    (
        "kernels.inline_cluster",
        "kernels.inline_rows",
        "kernels.inline_shear",
        "kernels.inline_steps",
        "kernels.scan",
        "kernels.tensor_tiling",
    ),
    ("kernels.tiling",),
    ("kernels.inline", "kernels.scalars", "kernels.shear_tiles"),
    ("catalog",),
    ("cache_cases",),
    ("cases",),
    ("testing",),
    ("reference",),
    ("contents",),
    ("sequences",),
    ("problem",),
    ("cache", "sheared"),
    ("layouts", "page_pool"),
    ("console", "errors", "exporting", "trace"),
)
LAYER_OF = {module: depth for depth, modules in enumerate(LAYERS) for module in modules}
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}

PRIVATE_PREFIXES = ("jax._src", "jaxlib.mlir", "jax.experimental.mosaic")
PRIVATE_READERS = (
    "kernels.mosaic",
    "kernels.inline",
    "kernels.inline_cluster",
    "kernels.inline_lanes",
    "kernels.inline_rows",
    "kernels.inline_shear",
    "kernels.inline_steps",
    "kernels.scalars",
    "kernels.scan",
)


def _imported_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Yields every absolute dotted name that the imports of a module may mean, wherever in the module they stand."""
    package = [PACKAGE, *module.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join(parents + ([node.module] if node.module else []))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _module_of(name: str, known: set[str]) -> str | None:
    """Returns the module of the package that an imported dotted name comes from, or None if it comes from elsewhere."""
    head, _, rest = name.partition(".")
    if head != PACKAGE:
        return None
    for candidate in (rest, rest.rpartition(".")[0]):
        if candidate in known:
            return candidate
    return "kernels.__init__" if rest.startswith("kernels") else "__init__"


def _private_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Yields each name of a module's imports and attribute chains that is private to jax."""
    written = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for name in {*_imported_names(module, tree), *written}:
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in PRIVATE_PREFIXES):
            yield name


def violations(module: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of a module, one sentence each; empty if all is well."""
    if module not in LAYER_OF:
        return [f"{module} has no place in LAYERS; give it one"]
    tree = ast.parse(source)
    imported = {_module_of(name, set(LAYER_OF)) for name in _imported_names(module, tree)} - {None}
    found = [
        f"{module} imports {other}, which is not below it"
        for other in sorted(filter(None, imported))
        if LAYER_OF[other] <= LAYER_OF[module]
    ]
    if module not in PRIVATE_READERS:
        only = PRIVATE_READERS[0]
        found += [f"{module} uses {name}; only {only} may" for name in sorted(_private_names(module, tree))]
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module):
    assert violations(module, SOURCES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("problem", "from inkling_pallas.attention import explain", "problem imports attention"),
        ("reference", "from .kernels import portable", "reference imports kernels.portable"),
        ("reference", "from inkling_pallas.kernels.softmax import rescale", "reference imports kernels.softmax"),
        ("splits", "import inkling_pallas", "splits imports __init__"),
        ("splits", "from inkling_pallas import bucket_max_seqlen_q", "splits imports __init__"),
        ("kernels.band", "from . import pages", "kernels.band imports kernels.pages"),
        ("kernels.softmax", "def late():\n    from .band import bias_tile", "kernels.softmax imports kernels.band"),
        ("kernels.combine", "from .. import attention", "kernels.combine imports attention"),
        ("kernels.hopper", "from jax._src import core", "kernels.hopper uses jax._src.core"),
        ("kernels.hopper", "import jax\njax._src.core.Jaxpr", "kernels.hopper uses jax._src.core"),
        ("kernels.epilogue", "from jaxlib.mlir import ir", "kernels.epilogue uses jaxlib.mlir.ir"),
        ("attention", "from jax.experimental.mosaic import gpu", "attention uses jax.experimental.mosaic.gpu"),
        ("somewhere", "", "somewhere has no place in LAYERS"),
    ],
)
def test_a_broken_arrow_is_named(module, source, complaint):
    assert any(found.startswith(complaint) for found in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__main__", "from . import demo\nimport numpy as np"),
        ("demo", "import inkling_pallas as ip\nfrom inkling_pallas.cases import Case"),
        ("kernels.hopper", "from jax.experimental.pallas import mosaic_gpu as plgpu\nfrom . import pages, mosaic"),
        ("kernels.mosaic", "from jax._src.pallas.mosaic_gpu import lowering\nfrom ..problem import Problem"),
    ],
)
def test_a_sound_arrow_passes(module, source):
    assert violations(module, source) == []
