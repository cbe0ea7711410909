"""Holds the arrows of the package: imports point down, from package to package and inside each; seams stay seams."""

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.host
PACKAGE = "inkling_pallas"
ROOT = Path(__file__).parent.parent / PACKAGE

# For the package (""), and for each package in it, its parts from top to bottom; those of one line never import each
# other. The `__init__` of a package may import all of it, and is imported as that package.
LAYERS = {
    "": "__main__ > bench > serving > plots > testing > parallel"
    " > attention cache_writes relative_bias > kernels > core",
    "bench": "command > report > options run_case > plots sheared > results sampled_judge series > peers"
    " > busy ceilings context targets write_kv > workloads clocks energy",
    "bench.peers": "registry > jax_libraries jax_paged torch_peers worker xla_dense"
    " > base contiguous fa4_score_mod torch_inputs",
    "serving": "demo simulate > options report > server > scheduler layer > page_pool synthetic trace warmup",
    "plots": "kernel > call > call_axes > call_data kernel_data",
    "testing": "command > soak_command > soak_processes soak_record > soak > judge promises soak_batches"
    " > catalog dense > cache_cases limits soak_shapes > cases reference",
    "parallel": "mesh > context merge",
    "kernels": "hopper blackwell portable > combine > phases > schedule shear write_kv > mosaic",
    "kernels.portable": "backend > q_tiles",
    "kernels.hopper": "backend > configs > decode_launch prefill_launch > decode prefill > prefill_mainloop_pipelined"
    " > decode_cluster prefill_mainloop > decode_scratch prefill_scratch",
    "kernels.blackwell": "backend > kernel > load_warps mma_warp softmax_warpgroup correction_warpgroup > work_loop"
    " > scratch > tiling",
    "kernels.shear": "kernel > tile_rows > tiling",
    "kernels.phases": "operands > pages bias softmax epilogue",
    "kernels.schedule": "tile_list_kernel > tile_list > split_kv > stream_k > seq_table > tiling",
    "kernels.mosaic": "tmem_rows > sheared_loads wgmma_rows > __init__ > ptx",
    "kernels.mosaic.ptx": "tmem_rows > cluster seq_table sheared_loads sheared_stores wgmma_rows"
    " > from_jaxpr numbering warpgroup",
    "core": "checked_call host_checks > dispatch > batch num_splits safe_lengths > buckets paged_cache problem"
    " > cache_layouts card_only console errors export run_info sheared_layout > describe devices integers",
}
MOST_ENTRIES = {"": 12, "kernels": 10}
# The oracle, and what decides by it, must not share code with what they judge.
NO_KERNEL = ("testing.reference", "testing.limits", "testing.cases", "testing.dense", "testing.soak_batches")
DEPTHS = {
    package: {part: depth for depth, line in enumerate(parts.split(" > ")) for part in line.split()}
    for package, parts in LAYERS.items()
}
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}

PRIVATE_PREFIXES = ("jax._src", "jaxlib.mlir", "jax.experimental.mosaic")
PRIVATE_READERS = "kernels.mosaic"
# What only one phase may do: the functions of `mosaic` that do it, and the phase.
ONLY_BY = {
    "kernels.phases.bias": ("gather_descending", "load_columns", "load_rows"),
    "kernels.phases.pages": ("prefetch_part",),
}


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


def _is_known(name: str) -> bool:
    parent, _, part = name.rpartition(".")
    return name in DEPTHS or part in DEPTHS.get(parent, ())


def _module_of(name: str) -> str | None:
    """Returns the module or package that an imported name comes from, "" for the whole; None for another's."""
    head, _, rest = name.partition(".")
    if head != PACKAGE:
        return None
    while rest and not _is_known(rest):
        rest = rest.rpartition(".")[0]
    return rest


def _within(module: str, package: str) -> bool:
    return not package or f"{module}.".startswith(f"{package}.")


def _point_down(module: str, other: str) -> bool:
    """True if an import between two modules goes to a lower layer of the package where their paths part."""
    if not other:  # the whole package, which nothing in it may import
        return False
    mine, others = module.split("."), other.split(".")
    if mine[-1] == "__init__" and _within(other, ".".join(mine[:-1])):
        return True
    shared = next((i for i, (a, b) in enumerate(zip(mine, others, strict=False)) if a != b), len(others))
    depths = DEPTHS[".".join(mine[:shared])]
    target = others[shared] if shared < len(others) else "__init__"  # of the package that the module stands in
    return depths[mine[shared]] < depths.get(target, -1)


def _private_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Yields each name of a module's imports, attribute chains and strings that is private to jax."""
    written = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for name in {*_imported_names(module, tree), *written, *strings}:
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in PRIVATE_PREFIXES):
            yield name


def violations(module: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of a module, one sentence each; empty if all is well."""
    if module != "__init__" and not _is_known(module.removesuffix(".__init__")):
        return [f"{module} has no place in LAYERS; give it one"]
    tree = ast.parse(source)
    imported = {m for name in _imported_names(module, tree) if (m := _module_of(name)) is not None} - {module}
    found = [f"{module} imports {o or PACKAGE}, which is not below it" for o in imported if not _point_down(module, o)]
    if module in NO_KERNEL:
        found += [f"{module} imports {o}; it must not know the kernels" for o in imported if _within(o, "kernels")]
    if not _within(module, PRIVATE_READERS):
        found += [f"{module} uses {name}; only {PRIVATE_READERS} may" for name in _private_names(module, tree)]
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called |= {name.rpartition(".")[2] for name in _imported_names(module, tree)}
    for phase, names in ONLY_BY.items():
        if _within(module, "kernels") and not _within(module, PRIVATE_READERS) and module != phase:
            found += [f"{module} uses {name}; only {phase} may" for name in names if name in called]
    return sorted(found)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module):
    assert violations(module, SOURCES[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("package", LAYERS)
def test_each_place_has_its_module(package):
    folder = ROOT.joinpath(*package.split(".")) if package else ROOT
    missing = [p for p in DEPTHS[package] if not ((folder / p).is_dir() or (folder / f"{p}.py").is_file())]
    assert missing == []
    entries = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    assert len(entries) <= MOST_ENTRIES.get(package, len(entries))


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("core.problem", "from inkling_pallas.attention import explain", "core.problem imports attention"),
        (
            "testing.reference",
            "from ..kernels.phases import softmax",
            "testing.reference imports kernels.",
        ),
        ("core.num_splits", "import inkling_pallas", "core.num_splits imports inkling_pallas"),
        ("bench.report", "from inkling_pallas import write_kv", "bench.report imports inkling_pallas"),
        ("serving.demo", "from inkling_pallas.bench import clocks", "serving.demo imports bench.clocks"),
        (
            "serving.page_pool",
            "from inkling_pallas.serving import scheduler",
            "serving.page_pool imports serv",
        ),
        ("kernels.phases.bias", "from . import pages", "kernels.phases.bias imports kernels.phases.pages"),
        ("kernels.phases.softmax", "def f():\n    from .bias import read_rows", "kernels.phases.softmax imports"),
        ("kernels.combine", "from .. import attention", "kernels.combine imports attention"),
        ("kernels.hopper.decode", "from ..hopper import attend", "kernels.hopper.decode imports kernels.hopper,"),
        ("kernels.mosaic.ptx.cluster", "from ...mosaic import WGMMA", "kernels.mosaic.ptx.cluster imports kernels.mos"),
        ("kernels.hopper.backend", "from jax._src import core", "kernels.hopper.backend uses jax._src.core"),
        ("kernels.hopper.backend", "import jax\njax._src.core.Jaxpr", "kernels.hopper.backend uses jax._src.core"),
        ("kernels.phases.epilogue", "from jaxlib.mlir import ir", "kernels.phases.epilogue uses jaxlib.mlir.ir"),
        ("core.export", "load('jax.experimental.mosaic.gpu')", "core.export uses jax.experimental.mosaic.gpu"),
        (
            "kernels.blackwell.kernel",
            "tmem_rows.load_rows(x)",
            "kernels.blackwell.kernel uses load_rows; only",
        ),
        (
            "kernels.hopper.decode",
            "mosaic.prefetch_part(x)",
            "kernels.hopper.decode uses prefetch_part; only",
        ),
        ("somewhere", "", "somewhere has no place in LAYERS"),
        ("core.somewhere", "", "core.somewhere has no place in LAYERS"),
    ],
)
def test_a_broken_arrow_is_named(module, source, complaint):
    assert any(found.startswith(complaint) for found in violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__main__", "from .serving import demo\nimport numpy as np"),
        ("__init__", "from inkling_pallas.serving.warmup import warmup"),
        (
            "serving.demo",
            "from inkling_pallas.testing.cases import Case\nfrom ..testing import row_errors",
        ),
        ("kernels.hopper.__init__", "from inkling_pallas.kernels.hopper.backend import attend"),
        (
            "kernels.hopper.decode",
            "from jax.experimental.pallas import mosaic_gpu as plgpu\nfrom ..phases import pages",
        ),
        ("kernels.mosaic.tmem_rows", "from inkling_pallas.kernels.mosaic import PLAIN"),
        ("kernels.mosaic.ptx.cluster", "from jax._src.pallas.mosaic_gpu import lowering\nfrom ....core import problem"),
    ],
)
def test_a_sound_arrow_passes(module, source):
    assert violations(module, source) == []


def imported_tests(source: str) -> set[str]:
    """Returns the test files that a file of tests imports, in programs that it holds as strings, too."""
    tree, found = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module or ''}.{alias.name}".removeprefix(".") for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(SyntaxError):
                found |= imported_tests(node.value)
    return {name for name in found if re.search(r"(^|\.)test_", name)}


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_test_file_is_imported(path):
    assert imported_tests(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    "source",
    [
        "from {} import shear_call",
        "def f():\n    import tests.{} as t",
        "CACHED = 'import absent_card, {} as t'",
        "from . import {}",
    ],
)
def test_an_import_of_a_test_file_is_named(source):
    assert len(imported_tests(source.format("test_sheared"))) == 1
    assert imported_tests(source.format("sheared_calls")) == set()
