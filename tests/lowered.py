"""Problems, and their kernels lowered for a GPU that need not be there and compiled for a card that is not."""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import absent_card
import jax
import jax.numpy as jnp

from inkling_pallas.core.cache_layouts import CacheDims, array_shape
from inkling_pallas.core.problem import Lengths, Operands, Problem
from inkling_pallas.core.sheared_layout import ShearedLogits
from inkling_pallas.kernels import hopper

# Both at once: a problem is compiled once for all that is asked of it.
_DUMPS = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}


def make_problem(
    heads: int,
    kv_heads: int,
    *,
    batch: int = 32,
    q_len: int = 1,
    head_dim: int = 128,
    local: bool = False,
    **facts: Any,
) -> Problem:
    """Returns a problem of the size that a server has; `facts` are other fields."""
    extent, window = (512, 511) if local else (1024, None)
    sizes = {"num_blocks": 1000, "block_size": 128, "max_blocks": 512, "num_splits": None, "return_lse": False}
    dtype = facts.pop("dtype", "bfloat16")
    return Problem(
        num_tokens=batch * q_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        batch_size=batch,
        max_seqlen_q=q_len,
        softmax_scale=1 / head_dim,
        causal=True,
        window_left=window,
        window_right=0,
        rel_extent=facts.pop("rel_extent", extent),
        dtype=dtype,
        out_dtype=facts.pop("out_dtype", dtype),
        **(sizes | facts),
    )


def lower(problem: Problem, device: Any = None, kernel: Any = hopper, config: Any = None) -> Any:
    """Lowers the kernels of a problem, with the config that it would get unless another is given."""
    assert kernel.unsupported(problem) is None
    config = config or kernel.choose_config(problem)
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

    def shape(dims, dtype=problem.dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)

    p = problem
    table = ShearedLogits.shape(p.num_tokens, p.num_heads, p.rel_extent, p.dtype)
    plain = shape((p.num_tokens, p.num_heads, p.rel_extent))
    cache = shape(array_shape(p.layout, CacheDims(p.num_blocks, p.block_size, p.num_kv_heads, p.head_dim)))
    operands = Operands(
        q=shape((p.num_tokens, p.num_heads, p.head_dim)),
        key_cache=cache,
        value_cache=cache if p.layout == "separate" else None,
        block_table=shape((p.batch_size, p.max_blocks), "int32"),
        rel_logits=jax.tree.map(lambda x: shape(x.shape, x.dtype), table) if p.sheared else plain,
        out=None,
    )
    lengths = Lengths(
        cache_seqlens=shape((p.batch_size,), "int32"),
        cu_seqlens_q=shape((p.batch_size + 1,), "int32"),
        kv_offset=None,
        total_seqlens=None,
    )

    def attend(operands, lengths):
        return kernel.attend(problem, config, operands, kernel.plan(problem, config, lengths), False)

    platforms: Any = {} if device is not None else {"lowering_platforms": ("cuda",)}
    return jax.jit(attend).trace(operands, lengths).lower(**platforms)


def kernels_in(lowered: Any) -> int:
    """Returns how many kernels there are in what `lower` gave."""
    return lowered.as_text().count("custom_call @mosaic_gpu")


class Compiled(NamedTuple):
    """What a compile for an H200 told."""

    lowered_kernels: int
    codes: list[str]  # PTX of each kernel
    registers: list[int]  # that a thread of each kernel takes
    spilled: list[int]  # bytes
    report: str


@functools.cache
def compiled(problem: Problem, config: Any = None) -> Compiled:
    """Lowers and compiles a problem for an H200 that is not here, once in a process."""
    with mock.patch.dict(os.environ, _DUMPS), _printed() as text:
        lowered = lower(problem, absent_card.device(), config=config)
        lowered.compile()
    report = text[0]
    return Compiled(
        lowered_kernels=kernels_in(lowered),
        codes=report.split(".entry ")[1:],
        registers=[int(n) for n in re.findall(r"Used (\d+) registers", report)],
        spilled=[int(n) for n in re.findall(r"(\d+) bytes spill stores", report)],
        report=report,
    )


@contextmanager
def _printed() -> Iterator[list[str]]:
    """Collects what is printed meanwhile, by code outside Python, too."""
    text: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield text
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            text.append(file.read())
