"""Assembly and launch for sm_100 and sm_110: what is supported, and the kernels of a call in order.

Interpreted and assembled (for sm_100a), never run on a card: `auto` does not take it for that reason.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inkling_pallas.core.devices import B200, Card
from inkling_pallas.core.errors import one_of, static_bool, static_int
from inkling_pallas.core.problem import Lengths, Operands, Problem
from inkling_pallas.core.safe_lengths import shifts_of_rows
from inkling_pallas.core.sheared_layout import ShearedLogits
from inkling_pallas.kernels import shear
from inkling_pallas.kernels.blackwell import kernel as blackwell_kernel
from inkling_pallas.kernels.blackwell.tiling import TensorTiling
from inkling_pallas.kernels.phases.operands import outputs_of, results_of
from inkling_pallas.kernels.schedule import tile_list_kernel
from inkling_pallas.kernels.schedule.tile_list import Worklist
from inkling_pallas.kernels.schedule.tiling import BLOCKS_KV, LINE_LIMIT, MOST_CTAS, MOST_STAGES

_MAX_ROWS = 64  # packed query rows of a sequence per kv head up to which keys are split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning choices: keys of a tile, tiles in flight, bias blocks in flight, CTAs, and what they walk.

    Where `num_ctas` is None there is one for each SM. With `splits` CTAs take equal shares of all keys, or whole units
    in turn, else whole tiles of query rows.
    """

    block_kv: int = 64
    num_stages: int = 3
    band_slots: int = 1
    num_ctas: int | None = None
    splits: bool = False

    def __post_init__(self) -> None:
        one_of("block_kv", self.block_kv, BLOCKS_KV, "Keys of a tile are columns of tensor memory.")
        static_int("num_stages", self.num_stages, 2, MOST_STAGES)
        static_int("band_slots", self.band_slots, 1, MOST_STAGES)
        static_bool("splits", self.splits)
        if self.num_ctas is not None:
            static_int("num_ctas", self.num_ctas, 1, MOST_CTAS)

    def on(self, card: Card) -> "Config":
        """Returns the config with its number of CTAs: where none is given, one for each SM."""
        return dataclasses.replace(self, num_ctas=self.num_ctas or card.num_sms)


def tiling_of(problem: Problem, config: Config, interpret: bool = False) -> TensorTiling:
    """Returns how the kernel cuts a problem, whose table is sheared by then."""
    problem = dataclasses.replace(problem, sheared=True)
    return TensorTiling(problem=problem, interpret=interpret, **dataclasses.asdict(config.on(B200)))


def unsupported(problem: Problem, card: Card = B200) -> str | None:
    """Returns why this backend does not take a problem, or None if it does."""
    p, portable = problem, 'Use backend="portable".'
    tiles = tiling_of(p, Config(splits=True)).most_positions if _has_few_rows(p) else 0
    rules: list[tuple[bool, str]] = [
        (p.causal, "causal must be True on Blackwell; got False."),
        (p.dtype in ("bfloat16", "float16"), f"q must have dtype bfloat16 or float16 on Blackwell; got {p.dtype}."),
        (p.head_dim in (64, 128), f"head_dim must be 64 or 128 on Blackwell; got {p.head_dim}."),
        (p.group <= 16, f"num_heads / num_kv_heads must be at most 16 on Blackwell; got {p.group}."),
        (p.block_size % 8 == 0, f"block_size must be a multiple of 8 on Blackwell; got {p.block_size}."),
        (
            tiles < LINE_LIMIT,
            f"the rows and keys of a batch must make fewer than 2**30 tiles on Blackwell; got {tiles}.",
        ),
        (not p.is_empty, "the batch and the cache must not be empty on Blackwell; got an empty shape."),
    ]
    for holds, sentence in rules:
        if not holds:
            return f"{sentence} {portable}"
    if not candidates(problem, card):
        return f"batch_size must leave room for its lengths in shared memory; got {p.batch_size}. {portable}"
    plain = jax.ShapeDtypeStruct((p.num_tokens, p.num_heads, p.rel_extent), jnp.dtype(p.dtype))
    return None if p.sheared else shear.unsupported(plain, p.rel_extent, projects=False, card=card)


def unproven(problem: Problem) -> str:
    """Returns why `auto` does not take any problem yet."""
    del problem
    command = "python -m inkling_pallas check --backend blackwell"
    return f"its kernel was interpreted and assembled, but has not run on a card yet. Check it on this one: {command}"


def config_fits(problem: Problem, config: Config, card: Card) -> bool:
    """Returns whether the buffers of a config that a caller gave fit a card."""
    return blackwell_kernel.fits(tiling_of(problem, config), card)


@functools.lru_cache(maxsize=4096)
def candidates(problem: Problem, card: Card = B200) -> tuple[Config, ...]:
    """Returns configurations that fit, from the one with most bytes in flight on. None was measured."""
    splits = _has_few_rows(problem)
    configs = [
        Config(num_stages=stages, band_slots=slots, num_ctas=card.num_sms, splits=splits)
        for stages in (4, 3, 2)
        for slots in (2, 1)
    ]
    return tuple(config for config in configs if blackwell_kernel.fits(tiling_of(problem, config), card))


def _has_few_rows(problem: Problem) -> bool:
    return problem.max_seqlen_q * problem.group <= _MAX_ROWS


def choose_config(problem: Problem, card: Card = B200) -> Config:
    """Returns the first configuration that fits."""
    return candidates(problem, card)[0]


class Plan(NamedTuple):
    """What the layers of a step share: the caller's lengths, and a list of tiles unless keys are split."""

    lengths: Lengths
    work: Worklist | None


def plan(problem: Problem, config: Config, lengths: Lengths, interpret: Any = False) -> Plan:
    """Returns the plan of a step."""
    if config.splits:
        return Plan(lengths, None)
    return Plan(
        lengths, tile_list_kernel.make_worklist(lengths, tiling_of(problem, config, bool(interpret)), interpret)
    )


def attend(
    problem: Problem, config: Config, operands: Operands, plan: Plan, interpret: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns attention and, if asked for, its log-sum-exp. See `inkling_rel_attention`.

    A plain table is sheared first, which reads and writes it once.

    Returns:
      out_dtype[num_tokens, num_heads, head_dim], float32[num_tokens, num_heads] or None.
    """
    tiling = tiling_of(problem, config, bool(interpret))
    operands = operands._replace(rel_logits=_shear(operands.rel_logits, plan.lengths, tiling, interpret))
    outputs = outputs_of(operands, problem)
    outputs = blackwell_kernel.attend(operands, plan.work or plan.lengths, outputs, tiling, interpret)
    return results_of(outputs, problem)


def _shear(bias: jax.Array | ShearedLogits, lengths: Lengths, tiling: TensorTiling, interpret: Any) -> ShearedLogits:
    """Returns the bias in the sheared layout."""
    if isinstance(bias, ShearedLogits):
        return bias
    extent, card = tiling.problem.rel_extent, dataclasses.replace(B200, num_sms=tiling.num_ctas)
    shifts = shifts_of_rows(tiling.problem.num_tokens, lengths, extent)
    return ShearedLogits(table=shear.shear(bias, shifts, interpret, card), shifts=shifts, rel_extent=extent)
