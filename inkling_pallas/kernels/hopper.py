"""Assembly and launch for sm_90: what is supported, with which tiles, and the kernels of a call in order."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from inkling_pallas.kernels import band, buffers, combine, decode, listing, mosaic, pages, prefill_launch
from inkling_pallas.kernels.tiling import RowTiling, Tiling
from inkling_pallas.kernels.worklist import Worklist
from inkling_pallas.problem import Lengths, Operands, Problem

_SMEM_BYTES = 227 * 1024
_SMEM_ALIGNMENT = 1024
_FEWEST_COLUMNS = 8  # of a matrix product
_MANY_TILES = 4  # of a CTA of the prefill kernel: from here on in clusters
_MAX_ROWS = 256  # packed query rows of a sequence per kv head that the decode kernel takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning choices: keys of a tile, tiles in flight, CTAs (one per SM), and which kernel.

    The prefill kernel also has a number of bias blocks in flight, may start the scores from their bias, and runs in
    clusters of `cluster_size` CTAs that fetch keys for each other. It leaves sequences with few rows to a decode kernel
    of config `few_rows`, if there is one.

    Of the prefill kernel, too, and off by default: `overlap` issues the scores of a KV tile with the values of the one
    before and runs its softmax beside them; `constant_offsets` reads a bias row from one address;
    `prefetches_items` fetches the next tile's item early. Without `turns` the warpgroups issue products at any time.
    """

    block_kv: int
    num_stages: int
    num_ctas: int = 132
    program: Literal["decode", "prefill"] = "decode"
    band_slots: int = 2
    bias_first: bool = True
    cluster_size: int = 1
    overlap: bool = False
    turns: bool = True
    constant_offsets: bool = False
    prefetches_items: bool = False
    few_rows: "Config | None" = None


def _tiling(problem: Problem, config: Config, interpret: bool = False, **more: Any) -> Tiling:
    return Tiling(
        problem=problem,
        block_kv=config.block_kv,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        interpret=interpret,
        **more,
    )


def _row_tiling(problem: Problem, config: Config, interpret: bool = False) -> RowTiling:
    return RowTiling(
        problem=problem,
        block_kv=config.block_kv,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        band_slots=config.band_slots,
        bias_first=config.bias_first,
        cluster_size=config.cluster_size,
        cluster_axis="rank" if config.cluster_size > 1 else None,
        overlap=config.overlap,
        turns=config.turns,
        constant_offsets=config.constant_offsets,
        prefetches_items=config.prefetches_items,
        interpret=interpret,
        fewest_rows=1 if config.few_rows is None else _few_rows(problem).max_seqlen_q + 1,
    )


def _fits(tiling: Tiling) -> bool:
    """True if the buffers fit a CTA's shared memory, each aligned as the compiler aligns it."""
    types = jax.tree.leaves(buffers.smem_types(tiling), is_leaf=lambda x: hasattr(x, "shape"))
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in types]
    used = sum(-(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT for size in sizes)
    return used + 2 * _SMEM_ALIGNMENT + 2048 <= _SMEM_BYTES


def _candidates(problem: Problem) -> list[Config]:
    """Returns configurations from the fastest on.

    Large copies are better, but not where large tiles leave CTAs without one, or many columns fill the registers
    with scores.
    """
    if _has_many_rows(problem):
        return _prefill_candidates(problem)
    shapes = [(128, 3), (64, 6), (128, 2), (64, 5), (64, 4), (64, 3), (64, 2)]
    configs = [Config(block_kv=block_kv, num_stages=stages) for block_kv, stages in shapes]
    tilings = [_tiling(problem, config) for config in configs]
    small = tilings[0].columns > 32 or _most_tiles(tilings[0]) <= tilings[0].num_ctas
    return [c for c, t in zip(configs, tilings, strict=True) if _fits(t) and (t.block_kv == 64 or not small)]


def _has_many_rows(problem: Problem) -> bool:
    """True if sequences may have more query rows than the decode kernel takes."""
    return problem.max_seqlen_q * problem.group > _MAX_ROWS


def _few_rows(problem: Problem) -> Problem:
    """Returns the problem of those sequences whose rows fit the fewest columns of a product of the decode kernel."""
    tokens = 1 << max(1, _FEWEST_COLUMNS // problem.group).bit_length() - 1
    return dataclasses.replace(problem, max_seqlen_q=min(tokens, problem.max_seqlen_q))


def _prefill_candidates(problem: Problem) -> list[Config]:
    """Returns configurations of the prefill kernel from the fastest on.

    Large tiles need fewer copies and products, but under a window they hold more keys that no row sees. Clusters fetch
    each key once for two CTAs (1 to 2 % on an H200), and share out few tiles less evenly.
    """
    wide = [(128, 2, 2, True), (128, 2, 1, True)]
    narrow = [(64, 3, 3, False), (64, 3, 2, False), (64, 2, 2, False)]
    shapes = wide + narrow if problem.window_left is None else narrow + wide
    few_rows = next(iter(_candidates(_few_rows(problem))), None) if problem.batch_size > 1 else None
    configs = [
        Config(
            program="prefill",
            block_kv=block_kv,
            num_stages=stages,
            band_slots=slots,
            bias_first=bias_first,
            few_rows=few_rows,
        )
        for block_kv, stages, slots, bias_first in shapes
    ]
    tiling = _row_tiling(problem, configs[0])
    if tiling.max_items * problem.num_kv_heads >= _MANY_TILES * tiling.num_ctas:
        configs = [dataclasses.replace(config, cluster_size=2) for config in configs]
    return [config for config in configs if prefill_launch.fits(_row_tiling(problem, config))]


def _most_tiles(tiling: Tiling) -> int:
    """Returns how many tiles the static facts allow at most."""
    problem = tiling.problem
    keys = problem.max_kv_len
    if problem.window_left is not None:
        keys = min(keys, problem.window_left + problem.max_seqlen_q)
    return problem.batch_size * problem.num_kv_heads * tiling.token_blocks * -(-keys // tiling.block_kv)


def unsupported(problem: Problem) -> str | None:
    """Returns why this backend does not take a problem, or None if it does."""
    p, portable = problem, 'Use backend="portable".'
    rules: list[tuple[bool, str]] = [
        (p.causal, "causal must be True on Hopper; got False."),
        (p.dtype in ("bfloat16", "float16"), f"q must have dtype bfloat16 or float16 on Hopper; got {p.dtype}."),
        (p.head_dim in (64, 128, 256), f"head_dim must be 64, 128 or 256 on Hopper; got {p.head_dim}."),
        (p.group <= 16, f"num_heads / num_kv_heads must be at most 16 on Hopper; got {p.group}."),
        (p.block_size % 8 == 0, f"block_size must be a multiple of 8 on Hopper; got {p.block_size}."),
        (p.sheared or p.rel_extent % 8 == 0, f"rel_extent must be a multiple of 8 on Hopper; got {p.rel_extent}."),
        (
            not _has_many_rows(p) or p.head_dim != 256,
            f"head_dim must be 64 or 128 for max_seqlen_q = {p.max_seqlen_q} on Hopper; got {p.head_dim}.",
        ),
        (not p.is_empty, "the batch and the cache must not be empty on Hopper; got an empty shape."),
    ]
    for holds, sentence in rules:
        if not holds:
            return f"{sentence} {portable}"
    if not _candidates(problem):
        return f"batch_size must leave room for its lengths in shared memory on Hopper; got {p.batch_size}. {portable}"
    return None


def unproven(problem: Problem) -> str | None:
    """Returns why `auto` does not take a problem yet that the kernel should be able to do, or None."""
    if _has_many_rows(problem):
        return f"max_seqlen_q = {problem.max_seqlen_q} takes the prefill kernel, which has not run on a card yet."
    if problem.sheared:
        return "a sheared table was interpreted and compiled here, but no kernel has read one on a card yet."
    if problem.layout == "separate":
        return None
    return f"the cache layout {problem.layout!r} was interpreted and compiled here, but has not run on a card yet."


def choose_config(problem: Problem) -> Config:
    """Returns the first configuration that fits; the order is that of measurements on an H200."""
    return _candidates(problem)[0]


class Plan(NamedTuple):
    """What the layers of a step share: the caller's lengths, of which kernels make a table each, and a list of tiles.

    The decode kernel needs no list.
    """

    lengths: Lengths
    work: Worklist | None


def plan(problem: Problem, config: Config, lengths: Lengths, interpret: Any = False) -> Plan:
    """Returns the plan of a step."""
    if config.program == "decode":
        return Plan(lengths, None)
    return Plan(lengths, listing.make_worklist(lengths, _row_tiling(problem, config, bool(interpret)), interpret))


def attend(
    problem: Problem, config: Config, operands: Operands, plan: Plan, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns attention and, if asked for, its log-sum-exp. See `inkling_rel_attention`.

    Returns:
      out_dtype[num_tokens, num_heads, head_dim], float32[num_tokens, num_heads] or None.
    """
    shape = (problem.num_tokens, problem.num_heads, problem.head_dim)
    rows = problem.num_tokens * problem.num_heads
    out = lax.empty(shape, jnp.dtype(problem.out_dtype)) if operands.out is None else operands.out
    results = (out.reshape(rows, problem.head_dim),) + (lax.empty((rows, 1), jnp.float32),) * problem.return_lse
    if plan.work is None:
        results = _decode(operands, plan.lengths, results, _tiling(problem, config, bool(interpret)), interpret)
    else:
        if config.few_rows is not None:
            more = {"clears_rows": False, "call_max_seqlen_q": problem.max_seqlen_q}
            tiling = _tiling(_few_rows(problem), config.few_rows, bool(interpret), **more)
            results = _decode(operands, plan.lengths, results, tiling, interpret)
        tiling = _row_tiling(problem, config, bool(interpret))
        results = prefill_launch.attend(operands, plan.work, results, tiling, interpret)
    return results[0].reshape(shape), results[1].reshape(shape[:2]) if problem.return_lse else None


def _decode(
    operands: Operands, lengths: Lengths, initial: tuple[jax.Array, ...], tiling: Tiling, interpret: Any
) -> tuple[jax.Array, ...]:
    """Launches the decode kernel and its combine over `initial`, the outputs as rows of one head."""
    part_out, part_lse, outputs = _attend_pieces(operands, lengths, initial, tiling, interpret)
    if tiling.whole_units:
        return outputs
    return combine.merge_pieces(part_out, part_lse, lengths, outputs, tiling, interpret)


def _attend_pieces(
    operands: Operands, lengths: Lengths, initial: tuple[jax.Array, ...], tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Launches the first kernel; returns its partial results and the outputs."""
    parts = tiling.slots * tiling.rows
    inputs = buffers.Gmem(
        q=operands.q,
        key=pages.split_pages(operands.cache_arrays[0], tiling),
        value=pages.split_pages(operands.cache_arrays[-1], tiling),
        block_table=operands.block_table,
        rel_logits=band.pad_for_interpreter(operands.rel_logits, tiling),
        lengths=lengths,
    )
    arrays, structure = jax.tree.flatten(inputs)
    refs = [jax.new_ref(x) for x in initial]

    def attend_pieces(*refs: Any, smem: Any, bars: Any) -> None:
        gmem = jax.tree.unflatten(structure, refs[: len(arrays)])
        out, *lse, part_out, part_lse = refs[len(arrays) :]
        decode.program(gmem, buffers.Results(part_out, part_lse, out, lse[0] if lse else None), smem, bars, tiling)

    part_out, part_lse = mosaic.kernel(
        attend_pieces,
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((parts, tiling.problem.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, 1), jnp.float32),
        ],
        grid=(tiling.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        scratch_types={"smem": buffers.smem_types(tiling), "bars": buffers.barrier_types(tiling)},
    )(*arrays, *refs)
    return part_out, part_lse, tuple(jax.freeze(ref) for ref in refs)
