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
from writes import aliased_outputs

import inkling_pallas as ip

LAYERS, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, EXTENT = 3, 16, 8, 2, 64, 48
STATIC: dict[str, Any] = {"softmax_scale": 1 / 64, "causal": True, "window_size": (47, 0), "rel_extent": EXTENT}
# q_lens and kv_lens: few rows of each sequence, for the decode kernel; many of one, for the prefill kernel beside it.
BATCHES = {"decode": ((1, 1, 1), (20, 1, 33)), "mixed": ((90, 3, 1), (90, 40, 64))}


def make_step(backend: str, *, with_plan: bool = True) -> Any:
    """Returns a server's step: layers of a kind in a scan over one donated pool, with one plan."""

    def step(pool: ip.PagedKVCache, rows: jax.Array, batch: ip.Batch) -> tuple[ip.PagedKVCache, Any]:
        q_shape = jax.ShapeDtypeStruct((batch.num_tokens, HEADS, HEAD_DIM), rows.dtype)
        named: dict[str, Any] = {"backend": backend}
        plan = ip.plan_batch(q_shape, pool, None, **batch.arguments(), **STATIC, **named) if with_plan else None

        def layer(pool: ip.PagedKVCache, index_and_rows: Any) -> Any:
            index, rows = index_and_rows
            own = batch.in_layer(index, num_blocks=pool.num_blocks // LAYERS, block_size=BLOCK_SIZE)
            q, k, v, bias = jnp.split(rows, [HEADS, HEADS + KV_HEADS, HEADS + 2 * KV_HEADS], axis=1)
            pool = ip.write_kv(pool, k, v, own.slots, **named)
            call = own.arguments() | STATIC | named | {"rel_logits": bias[:, :, :EXTENT], "plan": plan}
            return pool, ip.inkling_rel_attention(q, pool, None, **call)

        return jax.lax.scan(layer, pool, (jnp.arange(LAYERS, dtype=jnp.int32), rows))

    return jax.jit(step, donate_argnums=0)


def arguments(name: str, layout: str = "packed") -> tuple[Any, ...]:
    """Returns (pool, rows, batch) of a step."""
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    pool = ip.PagedKVCache.zeros(num_blocks=LAYERS * 18, layout=layout, **sizes)
    tables = np.random.default_rng(0).permutation(18).reshape(3, 6).tolist()
    q_lens, kv_lens = BATCHES[name]
    batch = ip.make_batch(q_lens, kv_lens, block_size=BLOCK_SIZE, block_tables=tables)
    shape = (LAYERS, batch.num_tokens, 2 * HEADS + 2 * KV_HEADS, HEAD_DIM)
    rows = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)
    return pool, rows, jax.device_put(batch)


def on_card(given: Any) -> Any:
    """Returns the shapes of arguments on the card that is not here."""
    card = jax.sharding.SingleDeviceSharding(absent_card.device())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=card), given)


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
    assert_in_place(compiled)
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') >= count


def assert_in_place(compiled: Any) -> None:
    """Asserts that a step uses the buffer of its packed pool and copies it nowhere."""
    shape = re.escape("bf16[54,2,16,128]")
    assert aliased_outputs(compiled) == 1
    assert re.search(shape + r"\S* (copy|transpose)\(", compiled.as_text()) is None
    assert compiled.memory_analysis().alias_size_in_bytes >= 54 * 2 * 16 * 128 * 2


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
import absent_card, test_ahead_of_time as t
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
