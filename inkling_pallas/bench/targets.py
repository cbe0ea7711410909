"""What the benchmark should show: for named workloads, how near to the floor, to a library without bias, to a sibling.

A ratio to libraries is taken to the best JAX one of the same run that leaves the bias out. Where FlashAttention-4 is
the best one known, a ratio to its published time stands beside it: here it runs in a process of its own, by its clock.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NO_BIAS = "_nobias"


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

# Ratio to the best library without bias, at most; where nothing was faster, the microseconds of flash-attn-4 4.0.0b36
# without score_mod (NVIDIA H200, 2026-11-29).
_NO_BIAS: Mapping[str, tuple[float, float | None]] = {
    "pre_g_2k": (1.20, 136.6), "pre_l16_2k": (1.20, None), "pre_g_8k": (1.10, 1799.0), "pre_l16_8k": (1.22, None),
    "pre_g_32k": (1.07, 26490.0), "pre_l16_32k": (1.20, None), "chunk_g_2k_on_30000": (1.08, 3224.0),
    "chunk_l16_2k_on_30000": (1.20, 103.4), "var8_g": (1.10, 1026.0), "var8_l16": (1.15, 521.8),
    "pre_tp8_g_8k": (1.12, 218.5), "pre_tp8_l_8k": (1.25, 51.1), "mix_g_31dec8k_1x2k": (1.00, 1063.0),
    "mix_l16_31dec8k_1x2k": (1.10, 153.8),
}  # fmt: skip

# Ratio to the sum of other cases of the same run, at most.
_SIBLINGS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "dec_g_b1_64k_p16": (1 / 0.95, ("dec_g_b1_64k",)),
    "dec_g_b32_8k_p16": (1 / 0.95, ("dec_g_b32_8k",)),
    "dec_l16_b32_8k_p16": (1 / 0.95, ("dec_l16_b32_8k",)),
    "skew_l": (1.03, ("short32_l",)),
    "pre_g_8k_p16": (1.05, ("pre_g_8k",)),
    "mix_g_31dec8k_1x2k": (1.05, ("mix_g_31dec8k", "mix_g_1x2k")),
    "mix_l16_31dec8k_1x2k": (1.05, ("mix_l16_31dec8k", "mix_l16_1x2k")),
    "pre_g_2k_bucket32k": (1.03, ("pre_g_2k",)),
}


def best_without_bias(case: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns (name, us) of the fastest peer without bias of a case in a results file, or None."""
    times = {name: us for name, us in case["peers"].items() if name.endswith(NO_BIAS)}
    return min(times.items(), key=lambda item: item[1], default=None)


def standings(case: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> list[Standing]:
    """Returns where a case stands against what is asked of it.

    Args:
      case: of a results file.
      cases: all cases of that file.
    """
    return list(_standings(case, {other["name"]: other["us"] for other in cases})) if case["us"] is not None else []


def _standings(case: Mapping[str, Any], times: Mapping[str, float | None]) -> Iterator[Standing]:
    name, us = case["name"], case["us"]
    if name in _FLOOR:
        yield Standing(what="of floor", figure=case["fraction"], bound=_FLOOR[name], at_most=False)
    same_clock = {peer: time for peer, time in case["peers"].items() if not peer.startswith("fa4")}
    best = best_without_bias({"peers": same_clock})
    if name in _NO_BIAS:
        bound, published = _NO_BIAS[name]
        if published is not None:
            what = f"x FA4's published {published:,.0f} us"
            yield Standing(what=what, figure=us / published, bound=bound, at_most=True)
        if best is not None:
            yield Standing(what=f"x {best[0]}", figure=us / best[1], bound=bound, at_most=True)
    if name in _SIBLINGS:
        bound, others = _SIBLINGS[name]
        siblings = [times.get(other) for other in others]
        known = [other for other in siblings if other is not None]
        if len(known) == len(others):
            yield Standing(what=f"x {' + '.join(others)}", figure=us / sum(known), bound=bound, at_most=True)
