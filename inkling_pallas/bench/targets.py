"""What the benchmark should show: for named workloads, how near to the floor, to a library without bias, to a sibling.

Ratios to libraries are to one of the same run that leaves the bias out, after a rest and without rests. To the best
one after a rest FlashAttention-4 does not count: it runs in a process of its own, by its own clock. Without rests both
clocks are the ends of long rows of calls, and it does.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

NO_BIAS = "_nobias"
OURS = "inkling_pallas"  # among the names of peers
_FA4 = "fa4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a case stands: a measured figure, what it is, its bound, and whether it is within it."""

    what: str
    figure: float
    bound: float
    at_most: bool

    @property
    def met(self) -> bool:
        """True if the figure is within its bound."""
        return self.figure <= self.bound if self.at_most else self.figure >= self.bound

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{self.figure:.3f} {self.what}, {sign} {self.bound:.3g} {'met' if self.met else 'MISSED'}"


# Fraction of the floor, at least.
_FLOOR = {
    "dec_g_b1_8k": 0.66, "dec_g_b1_64k": 0.89, "dec_g_b1_256k": 0.95, "dec_g_b8_8k": 0.88, "dec_g_b32_8k": 0.94,
    "dec_g_b32_64k": 0.96, "dec_g_b128_4k": 0.96, "dec_l16_b1_8k": 0.48, "dec_l16_b32_8k": 0.82,
    "dec_l16_b128_8k": 0.91, "dec_tp8_b1_64k": 0.64, "dec_tp8_b32_8k": 0.78, "dec_tp8l_b32_8k": 0.55,
    "mtp4_g_b32_8k": 0.92, "mtp4_l16_b32_8k": 0.75, "skew_g": 0.94,
}  # fmt: skip


class _Library(NamedTuple):
    """A bound for the ratio to a library: its name, or BEST of all, and the bound after a rest and without rests."""

    name: str
    rested: float | None
    busy: float | None


_BEST = "the best"
_TOKAMAX, _FA4_NOBIAS = f"tokamax{NO_BIAS}", f"{_FA4}{NO_BIAS}"
_LIBRARIES: Mapping[str, tuple[_Library, ...]] = {
    "pre_g_2k": (_Library(_TOKAMAX, 1.03, 1.06), _Library(_FA4_NOBIAS, None, 1.18)),
    "pre_g_8k": (_Library(_TOKAMAX, 1.02, 1.02), _Library(_FA4_NOBIAS, None, 1.09)),
    "pre_g_32k": (_Library(_TOKAMAX, 0.99, 1.00), _Library(_FA4_NOBIAS, None, 1.07)),
    "pre_l16_2k": (_Library(_TOKAMAX, 1.04, 1.08),),
    "pre_l16_8k": (_Library(_TOKAMAX, 1.05, 1.08), _Library(_FA4_NOBIAS, None, 1.10)),
    "pre_l16_32k": (_Library(_TOKAMAX, 1.08, 1.10),),
    "pre_tp8_g_8k": (_Library(_TOKAMAX, 0.88, 0.90),),
    "pre_tp8_l_8k": (_Library(_TOKAMAX, 1.06, 1.08),),
    "var8_g": (_Library(_BEST, 0.97, 1.08),),
    "var8_l16": (_Library(_BEST, 0.94, 0.95),),
    "chunk_g_2k_on_30000": (_Library(_BEST, 0.95, 1.08),),
    "chunk_l16_2k_on_30000": (_Library(_BEST, 1.12, 1.05),),
    "mix_g_31dec8k_1x2k": (_Library(_BEST, 1.00, None),),
    "mix_l16_31dec8k_1x2k": (_Library(_BEST, 1.10, None),),
}

# Microseconds of flash-attn-4 4.0.0b36 without score_mod (NVIDIA H200, 2026-11-29), and a bound for the ratio to them.
_PUBLISHED: Mapping[str, tuple[float, float]] = {
    "mix_g_31dec8k_1x2k": (1.00, 1063.0),
    "mix_l16_31dec8k_1x2k": (1.10, 153.8),
}

# Ratio to the sum of other cases of the same run, at most.
_SIBLINGS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "dec_g_b1_64k_p16": (1 / 0.95, ("dec_g_b1_64k",)),
    "dec_g_b32_8k_p16": (1 / 0.95, ("dec_g_b32_8k",)),
    "dec_l16_b32_8k_p16": (1 / 0.95, ("dec_l16_b32_8k",)),
    "skew_l": (1.03, ("short32_l",)),
    "pre_g_8k_p16": (1.03, ("pre_g_8k",)),
    "mix_g_31dec8k_1x2k": (1.05, ("mix_g_31dec8k", "mix_g_1x2k")),
    "mix_l16_31dec8k_1x2k": (1.05, ("mix_l16_31dec8k", "mix_l16_1x2k")),
    "pre_g_2k_bucket32k": (1.03, ("pre_g_2k",)),
}


def busy_times(case: Mapping[str, Any]) -> dict[str, float]:
    """Returns the microseconds without rests of each that was timed so, by name; ours is OURS."""
    return {name: busy["us"] for name, busy in case.get("busy", {}).items()}


def best_without_bias(times: Mapping[str, float]) -> tuple[str, float] | None:
    """Returns (name, us) of the fastest of some peers that leaves the bias out, or None."""
    without = {name: us for name, us in times.items() if name.endswith(NO_BIAS)}
    return min(without.items(), key=lambda item: item[1], default=None)


def standings(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """Returns where a case stands against what is asked of it.

    Args:
      case: of a results file.
      cases: all cases of that file.
    """
    return list(_standings(case, cases)) if case["us"] is not None else []


def _standings(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> Iterator[Standing]:
    name, us = case["name"], case["us"]
    if name in _FLOOR:
        yield Standing(what="of floor", figure=case["fraction"], bound=_FLOOR[name], at_most=False)
    if name in _PUBLISHED:
        bound, published = _PUBLISHED[name]
        yield Standing(what=f"x FA4's published {published:,.0f} us", figure=us / published, bound=bound, at_most=True)
    busy = busy_times(case)
    for library in _LIBRARIES.get(name, ()):
        same_clock = {peer: time for peer, time in case["peers"].items() if not peer.startswith(_FA4)}
        yield from _against(library.name, us, same_clock, library.rested, "")
        yield from _against(library.name, busy.get(OURS), busy, library.busy, ", busy")
    if name in _SIBLINGS:
        bound, others = _SIBLINGS[name]
        rested = {other["name"]: other["us"] for other in cases}
        yield from _beside(us, [rested.get(other) for other in others], others, bound, "")
        together = {other["name"]: busy_times(other).get(OURS) for other in cases}
        yield from _beside(busy.get(OURS), [together.get(other) for other in others], others, bound, ", busy")


def _against(
    library: str, us: float | None, times: Mapping[str, float], bound: float | None, clock: str
) -> Iterator[Standing]:
    best = best_without_bias(times) if library == _BEST else (library, times.get(library))
    if us is not None and bound is not None and best is not None and best[1] is not None:
        yield Standing(what=f"x {best[0]}{clock}", figure=us / best[1], bound=bound, at_most=True)


def _beside(
    us: float | None, siblings: Sequence[float | None], names: Sequence[str], bound: float, clock: str
) -> Iterator[Standing]:
    known = [sibling for sibling in siblings if sibling is not None]
    if us is not None and len(known) == len(names):
        yield Standing(what=f"x {' + '.join(names)}{clock}", figure=us / sum(known), bound=bound, at_most=True)
