"""Which tiles a problem gets on sm_90: tuning choices, what fits, and the order of measurements on an H200."""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from inkling_pallas.core.describe import describe
from inkling_pallas.core.devices import H200, Card
from inkling_pallas.core.errors import one_of, refuse, static_bool, static_int
from inkling_pallas.core.problem import Problem
from inkling_pallas.kernels import mosaic
from inkling_pallas.kernels.hopper import decode_scratch, prefill_launch
from inkling_pallas.kernels.schedule.tiling import BLOCKS_KV, MOST_CTAS, MOST_STAGES, RowTiling, Tiling

_SMEM_ALIGNMENT = 1024
_FEWEST_COLUMNS = 8  # of a matrix product
_MANY_UNITS = 3  # of a CTA of the decode kernel: from here on two CTAs per SM
_MANY_TILES = 4  # of a CTA of the prefill kernel: from here on in clusters
_MAX_ROWS = 256  # packed query rows of a sequence per kv head that the decode kernel takes
# The sizes of clusters, from the largest on, and which share of the SMs surely run CTAs of such clusters at the same
# time: a cluster stays within a group of 14 to 18 SMs. Of the 132 of an H200 that makes 96, 112 and 132.
_CLUSTERED_SMS = {8: (8, 11), 4: (28, 33), 2: (1, 1)}
_READING_CTAS = 64  # read memory at its full speed
_SHORT_KEYS = 1024  # of a unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tuning choices: keys of a tile, tiles in flight, CTAs (None: one for each SM), and which kernel.

    CTAs of the decode kernel share a unit in clusters of `cluster_size`, those of the prefill kernel fetch keys for
    each other. The prefill kernel also has a number of bias blocks in flight. With `overlap` it issues the scores of a
    KV tile together with the values of the one before, so that its softmax runs beside those. It leaves sequences with
    few rows to a decode kernel of config `few_rows`, if there is one.
    """

    block_kv: int
    num_stages: int
    num_ctas: int | None = None
    program: Literal["decode", "prefill"] = "decode"
    band_slots: int = 2
    cluster_size: int = 1
    overlap: bool = False
    few_rows: "Config | None" = None

    def __post_init__(self) -> None:
        one_of("block_kv", self.block_kv, BLOCKS_KV, "Keys of a tile are rows of a matrix product.")
        one_of("program", self.program, ("decode", "prefill"), "They are the two kernels.")
        one_of("cluster_size", self.cluster_size, (1, *sorted(_CLUSTERED_SMS)), "Cards take no more unasked.")
        static_int("num_stages", self.num_stages, 2, MOST_STAGES)
        static_int("band_slots", self.band_slots, 1, MOST_STAGES)
        static_bool("overlap", self.overlap)
        if self.num_ctas is not None:
            ctas = static_int("num_ctas", self.num_ctas, 1, MOST_CTAS)
            if ctas % self.cluster_size:
                rule = f"be a multiple of cluster_size = {self.cluster_size}, or None"
                raise refuse("num_ctas", rule, self.num_ctas, "None takes one CTA for each SM.")
        inner = self.few_rows
        if inner is not None and not (isinstance(inner, Config) and inner.program == "decode"):
            raise refuse("few_rows", "be a Config of program 'decode' or None", describe(inner), "See Config.")

    def on(self, card: Card) -> "Config":
        """Returns the config with its number of CTAs: where none is given, one for each SM, in whole clusters."""
        ctas = self.num_ctas or card.num_sms // self.cluster_size * self.cluster_size
        few_rows = None if self.few_rows is None else self.few_rows.on(card)
        return dataclasses.replace(self, num_ctas=ctas, few_rows=few_rows)


def tiling_of(problem: Problem, config: Config, interpret: bool = False, **more: Any) -> Tiling:
    """Returns how the decode kernel cuts a problem; `more` are further fields of Tiling.

    Raises:
      ValueError: if clusters are asked for that are fewer than units, cut them into more parts than num_splits, or have
        too little to merge.
    """
    tiling = Tiling(
        problem=problem,
        block_kv=config.block_kv,
        num_stages=config.num_stages,
        num_ctas=_ctas_of(config),
        interpret=interpret,
        ranks=config.cluster_size,
        **more,
    )
    broken = _broken_rule(tiling)
    if broken is not None:
        raise refuse("config", *broken)
    return tiling


def _ctas_of(config: Config) -> int:
    """Returns the CTAs of a config; of one that was made without a card, those of an H200."""
    return config.num_ctas or config.on(H200).num_ctas or 0


def _broken_rule(tiling: Tiling) -> tuple[str, Any, str] | None:
    """Returns what clusters must do and do not, the value, and what to do; None where they may share units."""
    most, splits, smaller = tiling.num_ctas // tiling.ranks, tiling.problem.num_splits, "Use smaller clusters."
    elements = tiling.rank_width * tiling.columns
    if tiling.ranks == 1:
        return None
    if tiling.most_units > most:
        return f"leave a cluster for each of {tiling.most_units} units", f"{most} clusters", "Use cluster_size=1."
    if splits is not None and splits < tiling.ranks:
        return f"have a cluster_size of at most num_splits = {splits}", tiling.ranks, smaller
    if elements % mosaic.THREADS:
        return f"leave each CTA of a cluster a multiple of {mosaic.THREADS} elements to merge", elements, smaller
    return None


def row_tiling_of(problem: Problem, config: Config, interpret: bool = False) -> RowTiling:
    """Returns how the prefill kernel cuts a problem."""
    return RowTiling(
        problem=problem,
        block_kv=config.block_kv,
        num_stages=config.num_stages,
        num_ctas=_ctas_of(config),
        band_slots=config.band_slots,
        cluster_size=config.cluster_size,
        cluster_axis="rank" if config.cluster_size > 1 else None,
        overlap=config.overlap,
        interpret=interpret,
        fewest_rows=1 if config.few_rows is None else few_rows_of(problem).max_seqlen_q + 1,
    )


def _fits(tiling: Tiling, smem_bytes: int) -> bool:
    """True if the buffers fit a CTA's shared memory, each aligned as the compiler aligns it."""
    types = jax.tree.leaves(decode_scratch.smem_types(tiling), is_leaf=lambda x: hasattr(x, "shape"))
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in types]
    used = sum(-(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT for size in sizes)
    return used + 2 * _SMEM_ALIGNMENT + 2048 <= smem_bytes


def config_fits(problem: Problem, config: Config, card: Card) -> bool:
    """Returns whether the buffers of a config that a caller gave fit a card.

    Raises:
      ValueError: as `tiling_of`.
    """
    if config.program == "decode":
        return _fits(tiling_of(problem, config), card.smem_of(1))
    inner = config.few_rows is None or config_fits(few_rows_of(problem), config.few_rows, card)
    return inner and prefill_launch.fits(row_tiling_of(problem, config), card)


@functools.lru_cache(maxsize=4096)
def candidates(problem: Problem, card: Card = H200) -> tuple[Config, ...]:
    """Returns configurations from the fastest on; made once for each problem and card.

    Large copies are better, but not where large tiles leave CTAs without one, or many columns fill the registers
    with scores. With the keys of three large tiles in flight those of a CTA's first come late and its last ones all at
    once: two took 0.5 to 0.75 us less, whatever there was to read (NVIDIA H200, jax 0.11.2, 2026-11-30: 8,192 keys
    14.6 -> 14.1, 8 sequences of them 66.9 -> 66.2). A CTA of one tile, or two, gains nothing by more stages, and each
    is barriers to initialise (the same card and day, one sequence under a window of 512 keys: 6.25 -> 6.13).
    """
    make = _prefill_candidates if has_many_rows(problem) else _decode_candidates
    return tuple(make(problem, card))


def _decode_candidates(problem: Problem, card: Card) -> list[Config]:
    shapes = [(128, 3), (64, 6), (128, 2), (64, 5), (64, 4), (64, 3), (64, 2)]
    if problem.window_left is None:
        shapes = [(128, 2), *shapes]
    if tiling_of(problem, Config(block_kv=64, num_stages=2, num_ctas=card.num_sms)).most_tiles <= card.num_sms:
        shapes = [(64, 2), *shapes]
    configs = [Config(block_kv=keys, num_stages=stages, num_ctas=card.num_sms) for keys, stages in shapes]
    tilings = [tiling_of(problem, config) for config in configs]
    small = tilings[0].columns > 32 or tilings[0].most_tiles <= tilings[0].num_ctas
    room = card.smem_of(1)
    fitting = [c for c, t in zip(configs, tilings, strict=True) if _fits(t, room) and (t.block_kv == 64 or not small)]
    paired = Config(block_kv=64, num_stages=3, num_ctas=2 * card.num_sms)
    if _gains_by_pairs(problem, paired, card):
        return [paired, *fitting]
    clustered = _clustered(problem, card)
    return fitting if clustered is None else [clustered, *fitting]


def _clustered(problem: Problem, card: Card) -> Config | None:
    """Returns the largest clusters that share a unit each, or None where they do not pay.

    The CTAs of a cluster merge their parts in shared memory: none leaves the chip, and no second kernel starts. As no
    CTA helps another cluster, units must be short, or those of one sequence, of which 64 CTAs read as fast as 132 do.
    All must run at the same time. NVIDIA H200, jax 0.11.2, 2026-11-30, 64 heads, without clusters and with: windows of
    512 keys, 1, 2 and 4 sequences 6.1 -> 5.2, 7.7 -> 6.5 and 9.4 -> 8.0 us; one sequence, global, 1,024, 8,192 and
    262,144 keys 6.3 -> 5.1, 12.9 -> 11.9 and 245.8 -> 242.6. Two of 8,192 keys in two waves: 20.6 -> 26.7.
    """
    tiling = tiling_of(problem, Config(block_kv=64, num_stages=2))
    window, fewest = problem.window_left, tiling.columns == _FEWEST_COLUMNS
    keys = problem.max_kv_len if window is None else min(problem.max_kv_len, window + problem.max_seqlen_q)
    short = keys <= _SHORT_KEYS
    reads_fast = problem.batch_size == 1 and problem.head_dim >= 128 and fewest
    for size, (part, whole) in _CLUSTERED_SMS.items():
        most = card.num_sms * part // whole // size * size
        ctas = tiling.most_units * size
        allowed = _broken_rule(dataclasses.replace(tiling, num_ctas=ctas, ranks=size)) is None
        # Many rows are bound by products, for which all SMs are wanted.
        few_rows = tiling.columns <= _FEWEST_COLUMNS * size
        pays = short or (reads_fast and ctas >= _READING_CTAS)
        if not (allowed and few_rows and pays and ctas <= card.num_sms):
            continue
        small, large = (Config(block_kv=n, num_stages=2, num_ctas=ctas, cluster_size=size) for n in (64, 128))
        one_per_sm = large if keys > small.block_kv * size and tiling.columns <= 2 * _FEWEST_COLUMNS else small
        if ctas <= most and _fits(tiling_of(problem, one_per_sm), card.smem_of(1)):
            return one_per_sm
        # Two on an SM also have the registers of few columns.
        if short and fewest and ctas <= card.num_sms and _fits(tiling_of(problem, small), card.smem_of(2)):
            return small
    return None


def _gains_by_pairs(problem: Problem, paired: Config, card: Card) -> bool:
    """True if two CTAs per SM, the config `paired`, pay: one reading keys while the other starts or ends a unit.

    That takes many short units, and few registers. NVIDIA H200, jax 0.11.2, 2026-11-30, windows of 512 keys: 2,048
    units 129.4 -> 127.0 us, 1,024 units 72.4 -> 70.7, 512 units 36.1 -> 37.3; 1,024 units of 4,096 keys the same.
    """
    tiling = tiling_of(problem, paired)
    short = problem.window_left is not None and tiling.whole_units and tiling.columns == _FEWEST_COLUMNS
    return short and tiling.most_units >= _MANY_UNITS * tiling.num_ctas and _fits(tiling, card.smem_of(2))


def has_many_rows(problem: Problem) -> bool:
    """True if sequences may have more query rows than the decode kernel takes."""
    return problem.max_seqlen_q * problem.group > _MAX_ROWS


def few_rows_of(problem: Problem) -> Problem:
    """Returns the problem of those sequences whose rows fit the fewest columns of a product of the decode kernel."""
    tokens = 1 << max(1, _FEWEST_COLUMNS // problem.group).bit_length() - 1
    return dataclasses.replace(problem, max_seqlen_q=min(tokens, problem.max_seqlen_q))


def _prefill_candidates(problem: Problem, card: Card) -> list[Config]:
    """Returns configurations of the prefill kernel from the fastest on.

    Large tiles need fewer copies and products, but under a window they hold more keys that no row sees. Clusters fetch
    each key once for two CTAs, and share out few tiles less evenly. NVIDIA H200, jax 0.11.2, 2026-11-30, one run each:
    8,192 tokens, global: 1,917 us, with overlap 1,890; local: 376 us, with overlap 392, with large tiles 382. Clusters:
    global 2,014 -> 1,995, local 401 -> 394.
    """
    wide = [(128, 2, 2, True), (128, 2, 1, True)]
    narrow = [(64, 3, 3, False), (64, 3, 2, False), (64, 2, 2, False)]
    shapes = wide + narrow if problem.window_left is None else narrow + wide
    few_rows = next(iter(candidates(few_rows_of(problem), card)), None) if problem.batch_size > 1 else None
    configs = [
        Config(
            program="prefill",
            block_kv=block_kv,
            num_stages=stages,
            num_ctas=card.num_sms,
            band_slots=slots,
            overlap=overlap,
            few_rows=few_rows,
        )
        for block_kv, stages, slots, overlap in shapes
    ]
    tiling = row_tiling_of(problem, configs[0])
    if tiling.max_items * problem.num_kv_heads >= _MANY_TILES * tiling.num_ctas:
        even = max(2, card.num_sms // 2 * 2)
        configs = [dataclasses.replace(config, cluster_size=2, num_ctas=even) for config in configs]
    return [config for config in configs if prefill_launch.fits(row_tiling_of(problem, config), card)]


def most_positions(problem: Problem) -> int:
    """Returns how long the decode kernel's line of work can be at most, of tiles of 64 keys."""
    few = few_rows_of(problem) if has_many_rows(problem) else problem
    return tiling_of(few, Config(block_kv=64, num_stages=2)).most_positions
