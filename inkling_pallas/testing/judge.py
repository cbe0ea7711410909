"""Judges a backend on cases: its error against the oracle, its margin, and the same sequences alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_pallas.attention import explain, inkling_rel_attention
from inkling_pallas.cache_writes import write_kv
from inkling_pallas.core.paged_cache import unpack_cache
from inkling_pallas.parallel.merge import merge_partials
from inkling_pallas.relative_bias import shear
from inkling_pallas.testing.cache_cases import before_write
from inkling_pallas.testing.cases import Case, build, part_of, sequence_alone
from inkling_pallas.testing.limits import baseline_rel_attention, error_limit, lse_errors, row_errors
from inkling_pallas.testing.reference import reference_rel_attention

# A check that a dropped bias would pass by less than this many limits is repeated with a spike in the bias.
MIN_MARGIN = 5.0
# Sequences of a batch that are run alone, at most; the first of each q_len come first.
_MAX_ALONE = 12
# Tokens that the margin is taken from, first and last included.
_MARGIN_TOKENS = 128
_INTERPRETED_CTAS = 2
_INTERPRETED_CLUSTERED_CTAS = 16
Operator = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a case showed."""

    case: Case
    row_error: float  # worst row
    limit: float
    margin: float  # error of the oracle with the bias dropped, over the limit
    lse_error: float  # over its limit
    alone_error: float  # worst row of a sequence run by itself
    failure: str = ""

    @property
    def red(self) -> bool:
        """True if the case failed."""
        return bool(self.failure)


def judge(case: Case, operator: Operator = inkling_rel_attention, **how: Any) -> Verdict:
    """Returns the verdict on a case.

    Args:
      case: what to run.
      operator: takes a call and returns (out, lse); `inkling_rel_attention` or a broken variant of it.
      **how: more arguments for it, such as backend, config or interpret.
    """
    verdict = _judge(case, operator, how)
    probe = _spike_probe(case)
    if verdict.red or verdict.margin >= MIN_MARGIN or probe is None:
        return verdict
    spiked = _judge(probe, operator, how)
    failure = f"with a spike at distance {probe.spike}: {spiked.failure}" if spiked.red else ""
    return dataclasses.replace(verdict, margin=max(verdict.margin, spiked.margin), failure=failure)


def attend_sheared(**call: Any) -> Any:
    """Returns what `inkling_rel_attention` gives for a call whose plain bias is sheared first.

    Args:
      **call: its arguments.
    """
    names = ("cu_seqlens_q", "cache_seqlens", "kv_offset", "total_seqlens")
    lengths: dict[str, Any] = {name: jnp.asarray(call[name]) for name in names if call.get(name) is not None}
    return inkling_rel_attention(**{**call, "rel_logits": shear(jnp.asarray(call["rel_logits"]), **lengths)})


# The operator by the layout of the bias that it is given.
OPERATORS: dict[str, Operator] = {"plain": inkling_rel_attention, "sheared": attend_sheared}


def interpreted(operator: Operator) -> Operator:
    """Returns an operator whose kernels run in the Pallas GPU interpreter, on a few CTAs: it runs one at a time.

    It waits for its results. The interpreter runs jax operations of its own, and those that the caller queues behind
    a kernel meanwhile can leave no place for them.
    """

    def attend(**call: Any) -> Any:
        config = _with_few_ctas(explain(**call).config)
        return jax.block_until_ready(operator(**call, config=config, interpret=True))

    return attend


def _with_few_ctas(config: Any) -> Any:
    """Returns a kernel's configuration with few CTAs.

    The CTAs of a decode's clusters share units, of which each has a cluster: a small grid stays, a large one goes
    without clusters.
    """
    few_rows = getattr(config, "few_rows", None)
    changes: dict[str, Any] = {} if few_rows is None else {"few_rows": _with_few_ctas(few_rows)}
    if config.num_ctas > _INTERPRETED_CLUSTERED_CTAS:
        changes["num_ctas"] = _INTERPRETED_CTAS
        if getattr(config, "program", "") == "decode":
            changes["cluster_size"] = 1
    return dataclasses.replace(config, **changes)


def _spike_probe(case: Case) -> Case | None:
    """Returns the case with a spike at a distance some row sees among other keys, or None where no row sees two."""
    seen = [kv_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True) if q_len and kv_len > 1]
    if case.spike is not None or not seen:
        return None
    left = case.window_size[0]
    furthest = min(max(seen) - 1, case.rel_extent - 1, max(seen) if left == -1 else left)
    return dataclasses.replace(case, spike=furthest)


def _judge(case: Case, operator: Operator, how: dict[str, Any]) -> Verdict:
    call = build(case)
    expected, expected_lse = reference_rel_attention(**call, return_lse=True)
    limit = error_limit(row_errors(baseline_rel_attention(**call), expected), case.dtype)
    given, write_failure = _write_rows(case, call) if case.write else (call, "")
    some = np.unique(np.linspace(0, max(0, case.num_tokens - 1), _MARGIN_TOKENS).astype(int))
    no_bias = reference_rel_attention(**dict(call, rel_logits=np.zeros_like(call["rel_logits"])), tokens=some)
    # Once for all calls; a pool of pages can be most of a case.
    given = given | {name: jax.tree.map(jnp.asarray, given[name]) for name in ("key_cache", "value_cache")}
    out, lse = _run(case, given, operator, how)
    row_error = _worst(row_errors(out, expected))
    lse_error = _worst(lse_errors(lse, expected_lse, case.dtype))
    alone_error = 0.0 if case.parts > 1 else _alone_error(given, expected, operator, how)
    failures = {
        write_failure: bool(write_failure),
        f"row error {row_error:.3g} over the limit {limit:.3g}": row_error > limit,
        f"LSE error {lse_error:.3g} times its limit": lse_error > 1,
        f"a sequence alone has row error {alone_error:.3g} over the limit {limit:.3g}": alone_error > limit,
    }
    return Verdict(
        case=case,
        row_error=row_error,
        limit=limit,
        margin=_worst(row_errors(no_bias, expected[some])) / limit,
        lse_error=lse_error,
        alone_error=alone_error,
        failure="; ".join(text for text, failed in failures.items() if failed),
    )


def _write_rows(case: Case, call: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the call with a cache that `write_kv` has completed, and what is wrong with that cache, if anything."""
    written = jax.jit(write_kv)(*before_write(case))
    wanted = unpack_cache(call["key_cache"], call["value_cache"])[:2]
    wrong = sum(np.count_nonzero(_bits(a) != _bits(b)) for a, b in zip(written.arrays, wanted, strict=False))
    failure = f"write_kv left {wrong} elements of the cache wrong" if wrong else ""
    return dict(call, key_cache=written, value_cache=None), failure


def _bits(array: Any) -> np.ndarray:
    """Returns the elements as integers, so that NaN equals itself."""
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}")


def _worst(errors: np.ndarray) -> float:
    return float(np.max(errors, initial=0.0))


def _run(case: Case, call: dict[str, Any], operator: Operator, how: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (out, lse) of the case, merged from its parts."""
    parts = (
        [call | {"return_lse": True}]
        if case.parts == 1
        else [part_of(call, part, case.parts) for part in range(case.parts)]
    )
    results = [operator(**part, **how) for part in parts]
    out, lse = results[0] if len(results) == 1 else merge_partials(*zip(*results, strict=True))
    return jax.device_get((out, lse))


def _alone_error(call: dict[str, Any], expected: np.ndarray, operator: Operator, how: dict[str, Any]) -> float:
    """Returns the worst row error of the batch's sequences, each run by itself."""
    offsets = call["cu_seqlens_q"]
    q_lens = np.diff(offsets)
    firsts = list(dict.fromkeys(int(np.flatnonzero(q_lens == n)[0]) for n in q_lens if n))
    others = [int(b) for b in np.flatnonzero(q_lens) if b not in firsts]
    worst = 0.0
    for b in (firsts + others)[:_MAX_ALONE]:
        out = operator(**sequence_alone(call, b), return_lse=True, **how)[0]
        own = slice(0, offsets[b + 1] - offsets[b])
        worst = max(worst, _worst(row_errors(jax.device_get(out)[own], expected[offsets[b] : offsets[b + 1]])))
    return worst
