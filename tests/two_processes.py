"""Run by test_sharding.py as each of two processes with 4 forced host devices: one mesh of 8 over both.

Arguments: the number of the process and the port of the first one. Prints a line for each form that gave what the
oracle gives, and one if a table that differs in the second process is seen there.
"""

import sys
from typing import Any

import jax
import numpy as np

import inkling_pallas as ip
from inkling_pallas.testing.cases import Case, build

CASE = Case(
    name="two processes",
    kind="example",
    q_lens=(1, 3, 1),
    kv_lens=(61, 40, 9),
    num_heads=16,
    num_kv_heads=4,
    head_dim=16,
    block_size=4,
    rel_extent=16,
    dtype="float32",
)
FORMS = {"heads": {"tp": 8}, "parts": {"cp": 8}, "heads and parts": {"cp": 2, "tp": 4}}


def on_mesh(sizes: dict[str, int], call: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted call over all devices, of which each process has a part, and its arguments."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    axes = {"head_axis": "tp" if "tp" in sizes else None, "context_axis": "cp" if "cp" in sizes else None}
    devices = ip.AttentionMesh.make(mesh, num_heads=CASE.num_heads, num_kv_heads=CASE.num_kv_heads, **axes)
    rest = dict(call)
    q, keys, values = (rest.pop(name) for name in ("q", "key_cache", "value_cache"))
    cache, shards = ip.PagedKVCache.separate(keys, values), None
    if devices.context_axis:
        tables, lengths = rest.pop("block_table"), rest.pop("cache_seqlens")
        shards, pages = ip.cut_context(tables, lengths, num_shards=devices.num_shards, block_size=CASE.block_size)
        shards, cache = jax.tree.map(np.asarray, shards), ip.take_pages(cache, pages)
    arrays = {name: rest.pop(name) for name in list(rest) if hasattr(rest[name], "dtype")}
    run = jax.jit(lambda q, cache, shards, arrays: devices.attend(q, cache, shards=shards, **arrays, **rest))
    return run, (q, devices.place(cache), shards, arrays)


def assert_close(out: jax.Array, want: np.ndarray) -> None:
    """Asserts that the parts of a result that are in this process are right."""
    assert not out.is_fully_addressable
    for shard in out.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), want[shard.index], rtol=1e-4, atol=1e-5)


def main(process: int, port: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process, initialization_timeout=60)
    assert (len(jax.local_devices()), len(jax.devices())) == (4, 8)
    call = build(CASE)
    want, _ = ip.reference_rel_attention(**call, return_lse=True)
    for form, sizes in FORMS.items():
        run, operands = on_mesh(sizes, call)
        assert_close(run(*operands), want)
        print(f"ok {form}", flush=True)
        if form == "heads":
            *others, arrays = operands
            table = call["block_table"][::-1] if process == 1 else call["block_table"]
            out = run(*others, arrays | {"block_table": table})
            if process == 1:
                np.testing.assert_raises(AssertionError, assert_close, out, want)
            print("ok another table is seen", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
