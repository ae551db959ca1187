"""A difference of scores over the same items, with its confidence interval.

Right/wrong items: Bonett and Price's interval for paired proportions (2012, adjusted Wald). It adds one item to each
kind of disagreement, so that no disagreement at all still leaves a width of about 2.8/n (the rule of three says 3/n).
Graded items: Student's t for large n on the differences, never narrower than the former is without disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite, sqrt
from statistics import fmean, variance

from equiport.compare.numbers import Frozen, Number

#: Two-sided 95 %.
Z95 = 1.959963984540054


class PairedDifference(Frozen):
    """target − baseline over `items` items. `better`/`worse`: items on which the target scores higher/lower.

    `low`, `high`: the 95 % interval; `half_width` its half; `method` names it.
    """

    items: int
    target: Number
    baseline: Number
    difference: Number
    low: Number
    high: Number
    better: int
    worse: int
    method: str

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def paired_difference(target: Sequence[float], baseline: Sequence[float]) -> PairedDifference:
    """Compare scores in [0, 1] of the same items, in the same order.

    Raises:
        ValueError: no items, unequal lengths, or a score that is not finite or outside [0, 1].
    """
    if not target or len(target) != len(baseline):
        raise ValueError(f"{len(target)} and {len(baseline)} scores are no pairs")
    if any(not isfinite(score) or not 0 <= score <= 1 for score in (*target, *baseline)):
        raise ValueError("a score is not within [0, 1]")
    differences = [float(ours) - float(theirs) for ours, theirs in zip(target, baseline, strict=True)]
    better, worse = sum(item > 0 for item in differences), sum(item < 0 for item in differences)
    count, mean = len(differences), fmean(differences)
    if all(score in (0, 1) for score in (*target, *baseline)):
        method, (low, high) = "paired proportions, Bonett-Price 95 %", _bonett_price(better, worse, count)
    else:
        spread = _t95(count) * sqrt(variance(differences) / count) if count > 1 else 1.0
        half = max(spread, _half(0, 0, count))
        method, (low, high) = "paired t, 95 %", (max(-1.0, mean - half), min(1.0, mean + half))
    return PairedDifference(
        items=count,
        target=fmean(target),
        baseline=fmean(baseline),
        difference=mean,
        low=low,
        high=high,
        better=better,
        worse=worse,
        method=method,
    )


def items_to_settle(found: PairedDifference, half_width: float, margin: float | None = None) -> int:
    """How many items would bring the half-width to `half_width`, at the disagreement seen so far.

    With `margin` (the distance of the difference from the limit) the interval must also leave the limit out.
    """
    wanted = min(half_width, margin) if margin else half_width
    if found.method.startswith("paired proportions"):
        # one item of each kind is added, as in the interval: few items must not promise too much
        count = found.items + 2
        both = (found.better + found.worse + 2) / count
        spread = both - ((found.better - found.worse) / count) ** 2
    else:
        spread = (found.half_width / Z95) ** 2 * found.items
    return max(found.items + 1, ceil(Z95**2 * spread / wanted**2))


def _bonett_price(better: int, worse: int, count: int) -> tuple[float, float]:
    centre, half = (better - worse) / (count + 2), _half(better, worse, count)
    return max(-1.0, centre - half), min(1.0, centre + half)


def _half(better: int, worse: int, count: int) -> float:
    more, less = (better + 1) / (count + 2), (worse + 1) / (count + 2)
    return Z95 * sqrt((more + less - (more - less) ** 2) / (count + 2))


def _t95(count: int) -> float:
    """Student's 97.5 % quantile for count − 1 degrees of freedom, by Cornish and Fisher's expansion (1 % from 4 on)."""
    degrees = count - 1
    if degrees < 4:
        return (12.71, 4.303, 3.182)[degrees - 1]
    cube = (Z95**3 + Z95) / 4
    fifth = (5 * Z95**5 + 16 * Z95**3 + 3 * Z95) / 96
    return Z95 + cube / degrees + fifth / degrees**2
