"""Compiled elsewhere or before: jax.export, the persistent compilation cache, one plan in a scan, donation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from steps import arguments, make_step, on_card
from writes import assert_pool_in_place

import inkling_pallas as ip
from inkling_pallas.testing.cases import Case, build


def round_trip(exported: export.Exported) -> export.Exported:
    pytest.importorskip("flatbuffers", reason="jax.export writes bytes with flatbuffers")
    return export.deserialize(exported.serialize())


def test_an_exported_step_gives_the_same_bits():
    step = make_step("portable")
    again = round_trip(export.export(step)(*arguments("mixed")))
    wanted: Any = step(*arguments("mixed"))
    got: Any = again.call(*arguments("mixed"))
    assert isinstance(got[0], ip.PagedKVCache)
    assert got[0].layout == "packed"
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


READER = """
import sys
import inkling_pallas
from jax import export
assert "jax.experimental.mosaic.gpu" not in sys.modules
export.deserialize(bytearray(sys.stdin.buffer.read()))
assert "jax.experimental.mosaic.gpu" in sys.modules
"""


def test_reading_a_step_loads_the_runtime_of_its_kernels():
    pytest.importorskip("flatbuffers", reason="jax.export writes bytes with flatbuffers")
    data = export.export(jax.jit(lambda cache: cache))(arguments("decode")[0]).serialize()
    done = subprocess.run([sys.executable, "-c", READER], input=bytes(data), check=False)
    assert done.returncode == 0


def kernels(text: str) -> int:
    return len(re.findall(r"custom_call @mosaic_gpu", text))


@pytest.mark.lowering
@pytest.mark.full
@pytest.mark.parametrize(("name", "count"), [("decode", 2), ("mixed", 4)])
def test_an_exported_step_has_its_kernels_inside_and_compiles_for_a_card(name, count):
    exported = export.export(make_step("hopper"), platforms=("cuda",))(*arguments(name))
    again = round_trip(exported)
    assert again.platforms == ("cuda",)
    assert kernels(exported.mlir_module()) == kernels(again.mlir_module()) == count
    if absent_card.missing():
        pytest.skip(f"no compile for a card: {absent_card.missing()}")
    compiled: Any = jax.jit(again.call, donate_argnums=0).lower(*on_card(arguments(name))).compile()
    assert_pool_in_place(compiled)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') >= count


@pytest.mark.parametrize("with_plan", [True, False])
def test_a_scan_over_layers_plans_once(with_plan):
    traced = make_step("hopper", with_plan=with_plan).trace(*arguments("mixed"))
    (loop,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    assert "_jitted_plan" in str(traced.jaxpr)
    assert ("_jitted_plan" in str(loop.params["jaxpr"])) == (not with_plan)


CACHED = """
import json, os, sys
import jax
from jax import monitoring
for name, value in {"dir": sys.argv[1], "min_compile_time_secs": 0, "min_entry_size_bytes": -1}.items():
    prefix = "jax_compilation_cache_" if name == "dir" else "jax_persistent_cache_"
    jax.config.update(prefix + name, value)
misses = []
monitoring.register_event_listener(lambda event, **_: misses.append(event) if event.endswith("cache_misses") else None)
import absent_card, steps as t
jax.block_until_ready(t.make_step("portable")(*t.arguments("decode")))
compiled_here = len(misses)
if not absent_card.missing():
    t.make_step("hopper").lower(*t.on_card(t.arguments("decode"))).compile()
print(json.dumps({"compiled": compiled_here, "entries": sorted(os.listdir(sys.argv[1]))}))
"""


def run_cached(folder: Path) -> dict[str, Any]:
    """Runs a step in a process of its own; returns how much it compiled, and the cache's entries after it."""
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "1", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    command = [sys.executable, "-c", CACHED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.lowering
@pytest.mark.full
def test_a_second_process_compiles_nothing(tmp_path):
    first, second = run_cached(tmp_path), run_cached(tmp_path)
    assert first["compiled"] > 0
    assert second["compiled"] == 0
    # What was compiled for a card cannot be loaded without one, but it was looked for under the same key.
    entries = [{name for name in run["entries"] if not name.endswith("-atime")} for run in (first, second)]
    assert entries[0] == entries[1]
    assert sum(name.startswith("jit_step") for name in entries[0]) == (1 if absent_card.missing() else 2)


LAYERS: dict[str, Any] = build(Case(name="stacked", kind="example", q_lens=(33, 1), kv_lens=(70, 200), head_dim=64))
SLICED = ("q", "key_cache", "value_cache", "rel_logits")


def over_stacked_layers(layers: dict[str, jax.Array], outs: jax.Array) -> Any:
    """Every array of a layer is a slice of one of all layers, and what a layer makes goes to a slice."""
    rest = {name: value for name, value in LAYERS.items() if name not in SLICED}
    new = jnp.ones((1100, 2, 64), jnp.bfloat16)

    def layer(none: None, given: Any) -> Any:
        arrays, out = given
        cache = ip.PagedKVCache.separate(arrays["key_cache"], arrays["value_cache"])
        slots = jnp.arange(1100, dtype=jnp.int32)
        written = ip.write_kv(cache, new, new, slots, backend="hopper")
        call = {"rel_logits": arrays["rel_logits"], **rest, "backend": "hopper", "out": out}
        return none, (written, ip.inkling_rel_attention(arrays["q"], cache, None, **call))

    return jax.lax.scan(layer, None, (layers, outs))[1]


def written_in_place(program: str) -> list[tuple[str, str]]:
    """Returns (computation, line) of each kernel of a compiled program that writes in place."""
    found, computation = [], ""
    for line in program.splitlines():
        if re.match(r"%\S+ \(.*\{$", line):
            computation = line.split()[0]
        if 'custom_call_target="mosaic_gpu' in line and "output_to_operand_aliasing" in line:
            found.append((computation, line))
    return found


@pytest.mark.lowering
@pytest.mark.full
@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
def test_no_slice_parts_a_kernel_from_what_it_writes_in_place():
    """XLA makes a kernel one with slices around it. In place, it would then write elsewhere than is read."""
    layers = {name: jnp.stack([jnp.asarray(LAYERS[name])] * 2) for name in SLICED}
    given = on_card((layers, jnp.zeros((2, *LAYERS["q"].shape), jnp.bfloat16)))
    program = str(jax.jit(over_stacked_layers).lower(*given).compile().as_text())
    kernels = written_in_place(program)
    assert len(kernels) == 3  # the write, the decode kernel and its combine
    for computation, line in kernels:
        fused = "dynamic-slice-fusion" in computation
        operands = re.findall(r"%[\w.\-]+", line.partition("custom-call(")[2].partition(")")[0])
        in_place = [operands[int(n)] for n in re.findall(r"\((\d+), \{\}\)", line)]
        assert not fused or (line.strip().startswith("ROOT") and all(name.startswith("%p") for name in in_place)), line
