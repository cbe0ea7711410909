"""Heads and parts of sequences on 8 forced host devices, in their own process; words for a mesh that does not fit."""

import contextlib
import functools
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import absent_card
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_processes import FORMS

import inkling_pallas as ip
from inkling_pallas.__main__ import main

PROGRAM = Path(__file__).parent / "eight_devices.py"
CHECKS = (
    "heads_over_1_2_devices",
    "kv_heads_on_several_devices",
    "context_over_1_2_3_8_devices",
    "parts_of_many_rows_are_summed",
    "heads_and_context",
    "bfloat16",
    "growth_lands_on_the_last_part",
    "bench_context_is_green_and_can_be_red",
    "a_mesh_of_explicit_axes",
    "arrays_of_several_devices_take_no_kernel",
    "a_context_mesh_takes_no_kernel_but_inside_shard_map",
    "a_context_mesh_is_that_of_the_attention_mesh_or_named",
    "inside_a_shard_map_over_another_axis",
)
BROKEN = (
    "parts averaged",
    "parts not merged",
    "no kv_offset",
    "no total_seqlens",
    "kv heads of another group",
    "new keys in the first part",
)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_on_eight_devices_and_each_check_on_a_broken_variant(first):
    forced = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    broken = BROKEN[first::2] if jax.__version_info__ < (0, 12) else ()  # red or not, whatever the version
    command = [sys.executable, str(PROGRAM), str(first), *(["broken"] if broken else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | forced)
    assert done.stdout.splitlines() == [f"ok {name}" for name in (*CHECKS[first::2], *broken)], (
        done.stdout + done.stderr
    )


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@pytest.mark.slow
@pytest.mark.full
def test_on_two_processes_of_four_devices():
    """As over two machines: AttentionMesh over a mesh of which a process has a part."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    forced = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM.with_name("two_processes.py"))]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        runs = [
            subprocess.Popen([*command, str(i), port], stdout=log, stderr=subprocess.STDOUT, env=os.environ | forced)
            for i, log in enumerate(logs)
        ]
        deadline = time.monotonic() + 120
        for run in runs:
            stack.callback(run.wait)
            stack.callback(run.kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for run in runs:
                run.wait(max(0.0, deadline - time.monotonic()))
        texts = [_read(log) for log in logs]
        wanted = [f"ok {form}" for form in (*FORMS, "another table is seen")]
        for run, text in zip(runs, texts, strict=True):
            assert run.returncode == 0, "\n\n".join(texts)
            assert [line for line in wanted if line in text] == wanted


@pytest.mark.lowering
@pytest.mark.skipif(absent_card.missing() is not None, reason=str(absent_card.missing()))
def test_a_million_keys_compile_for_two_cards():
    """Without a card: each reads its half in place, and only 33 KB of partial results and their LSE travel."""
    mesh = jax.sharding.Mesh(np.array(absent_card.devices(2)), ("cp",))
    devices = ip.AttentionMesh.make(mesh, num_heads=64, num_kv_heads=8, context_axis="cp")
    shards, pages = ip.cut_context([range(1, 16385)], [1_048_576], num_shards=2, block_size=64)

    def shape(dims, dtype="bfloat16", spec=None) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec or jax.P())
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    half_on_each = shape((pages.size, 64, 8, 128), spec=jax.P("cp"))
    cache = ip.PagedKVCache.separate(half_on_each, half_on_each)
    static = {"max_seqlen_q": 1, "causal": True, "window_size": (-1, -1), "rel_extent": 1024, "backend": "hopper"}
    attend = jax.jit(functools.partial(devices.attend, softmax_scale=1 / 128, **static))
    compiled = attend.lower(
        shape((1, 64, 128)),
        cache,
        shards=jax.tree.map(lambda x: shape(x.shape, "int32", jax.P("cp") if x.ndim > 1 else None), shards),
        rel_logits=shape((1, 64, 1024)),
        cu_seqlens_q=shape((2,), "int32"),
    ).compile()
    program = str(compiled.as_text())
    assert "all-reduce" not in program
    gathered = re.findall(r"f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", program)
    assert [math.prod(map(int, dims.split(","))) for dims in gathered] == [2 * 64 * (128 + 1)]
    memory: Any = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < 2**31 * 1.001
    assert memory.temp_size_in_bytes < 2**22


def one_device(*names):
    return jax.make_mesh((1,) * len(names), names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


@pytest.mark.parametrize(
    ("size", "heads", "message"),
    [
        (3, (8, 1), "num_heads must be a multiple of 3, the size of mesh axis 'tp'; got 8."),
        (16, (8, 8), "num_heads must be a multiple of 16, the size of mesh axis 'tp'; got 8."),
        (4, (12, 6), "num_kv_heads must be a multiple or a divisor of 4, the size of mesh axis 'tp'; got 6."),
        (4, (12, 3), "num_kv_heads must be a multiple or a divisor of 4, the size of mesh axis 'tp'; got 3."),
    ],
)
def test_an_axis_that_does_not_divide_the_heads(size, heads, message):
    mesh: Any = jax.sharding.AbstractMesh((size,), ("tp",))  # refused before a device is asked for
    with pytest.raises(ValueError, match="^" + message):
        ip.AttentionMesh.make(mesh, num_heads=heads[0], num_kv_heads=heads[1], head_axis="tp")


def test_an_axis_that_is_not_there_or_taken():
    mesh = one_device("tp", "cp")
    make = functools.partial(ip.AttentionMesh.make, mesh, num_heads=4, num_kv_heads=2)
    with pytest.raises(ValueError, match="head_axis must be an axis of the mesh, tp, cp; got 'x'"):
        make(head_axis="x")
    with pytest.raises(ValueError, match="context_axis must be another axis than head_axis; got 'cp'"):
        make(head_axis="cp", context_axis="cp")


def attend_on(devices, **arguments):
    cache = ip.PagedKVCache.zeros(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=16)
    return devices.attend(np.zeros((1, 4, 16)), cache, **arguments)


def test_what_does_not_go_together():
    by_part = ip.AttentionMesh.make(one_device("cp"), num_heads=4, num_kv_heads=2, context_axis="cp")
    by_head = ip.AttentionMesh.make(one_device("tp"), num_heads=4, num_kv_heads=2, head_axis="tp")
    one, _ = ip.cut_context([[1]], [3], num_shards=1, block_size=4)
    two, _ = ip.cut_context([[1]], [3], num_shards=2, block_size=4)
    with pytest.raises(ValueError, match="shards must be given exactly where there is a context axis; got NoneType"):
        attend_on(by_part)
    with pytest.raises(ValueError, match="shards must be given exactly where there is a context axis; got Context"):
        attend_on(by_head, shards=one)
    with pytest.raises(ValueError, match="shards must have 1 parts, the size of mesh axis 'cp'; got 2"):
        attend_on(by_part, shards=two)
    with pytest.raises(ValueError, match="block_table must be left out here"):
        attend_on(by_part, shards=one, block_table=1)
    with pytest.raises(ValueError, match="plan must be left out here"):
        attend_on(by_head, plan=1)


def test_a_cut_is_explained():
    with pytest.raises(ValueError, match=r"block_tables\[1\] must have at least 2 pages; got 1"):
        ip.cut_context([[1], [2]], [3, 5], num_shards=2, block_size=4)
    with pytest.raises(ValueError, match=r"kv_lens\[0\] must be a static int in \[0, 536870912\]; got -1"):
        ip.cut_context([[1]], [-1], num_shards=2, block_size=4)
    with pytest.raises(ValueError, match="block_tables must have one entry per entry of kv_lens, 2; got 1"):
        ip.cut_context([[1]], [1, 1], num_shards=2, block_size=4)
    shards, _ = ip.cut_context([[1, 2]], [7], num_shards=2, block_size=4, spare_blocks=1)
    assert shards.grown([12]).cache_seqlens.tolist() == [[4], [8]]
    with pytest.raises(
        ValueError, match=r"total_seqlens\[0\] must lie in \[0, 12\].*; got 13. Growth needs spare_blocks"
    ):
        shards.grown([13])


def test_bench_context_explains_bad_options(capsys):
    assert main(["bench-context", "--devices", "99"]) == 2
    assert "--devices must be at most" in capsys.readouterr().out
    assert main(["bench-context", "--keys", "64", "--heads", "7", "--kv-heads", "2", "--devices", "1"]) == 2
    assert "num_heads must be a multiple of num_kv_heads = 2; got 7" in capsys.readouterr().out


def test_pages_of_nobody_stay_so_where_a_context_is_cut():
    shards, pages = ip.cut_context([[-1, 2, 5]], [12], num_shards=2, block_size=4)
    assert shards.block_table[0].tolist() == [[-1, 0]]
    assert shards.block_table[1].tolist() == [[1, 2]]
    cache = ip.PagedKVCache.zeros(num_blocks=5, block_size=4, num_kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"pages\[1, 2\] must lie in \[0, 5\).*; got 5"):
        ip.take_pages(cache, pages)
