"""Thresholds from ports known to be good: what they measure, at a high quantile, times a margin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from equiport.compare.logits import LogitComparison
from equiport.compare.thresholds import Thresholds
from equiport.errors import EquiportError

#: R of a port exactly as precise as its source is 1: no limit is tightened further.
LOWEST_R = 1.05
_ENOUGH_POSITIONS = 100


@dataclass(frozen=True)
class Calibration:
    """How the quantiles are turned into limits."""

    r_quantile: float = 0.99
    kl_quantile: float = 0.95
    safety_margin: float = 1.1


@dataclass(frozen=True)
class Change:
    """One threshold before and after. `samples`: figures it rests on. `looser`: more is let through than before."""

    name: str
    before: float
    after: float
    samples: int
    looser: bool

    def line(self) -> str:
        """Shipped beside calibrated."""
        how = "unchanged" if self.after == self.before else "LOOSER" if self.looser else "tighter"
        return f"{self.name}: shipped {self.before:.6g}, calibrated {self.after:.6g} ({how}; {self.samples} figures)"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed: of few values, the largest."""
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, ceil(share * len(ordered)))) - 1]


def calibrate(
    ratios: Mapping[str, Sequence[float]],
    paths: Sequence[LogitComparison],
    how: Calibration,
    start: Thresholds | None = None,
) -> tuple[Thresholds, list[Change]]:
    """τ_R of each component type from `ratios` (geometric means of R by type); τ_R, θ, δ from teacher-forced `paths`.

    R: the `r_quantile` of the figures, times the margin, at least 1.05. θ: the lowest centred cosine p5's distance from
    1, times the margin. δ: the largest of the paths' `kl_quantile` over positions, times the margin. τ_R and δ use the
    paths of 100 positions and more where there are any: statistics of a few are luck.

    Raises:
        EquiportError: nothing to calibrate from, or a figure that is not finite.
    """
    if not paths and not any(ratios.values()):
        raise EquiportError("no figure to calibrate from", remedy="Give results of stages that compared something.")
    shipped = start or Thresholds()
    numbers = [value for values in ratios.values() for value in values]
    numbers += [number for path in paths for number in (path.r_centred, path.cosine_centred.p5, *path.columns.kl)]
    if not all(isfinite(number) for number in numbers):
        raise EquiportError("a figure is NaN or infinite", remedy="Leave that result out: its port is not known good.")
    changes, update = [], {}
    by_type: dict[str, float] = {}
    for kind, values in sorted(ratios.items()):
        if values:
            by_type[kind] = _limit(values, how)
            before = shipped.component_limit(kind)
            changes.append(Change(f"τ_R of {kind}", before, by_type[kind], len(values), by_type[kind] > before))
    if paths:
        long = [path for path in paths if path.positions >= _ENOUGH_POSITIONS] or list(paths)
        tau = _limit([path.r_centred for path in long], how)
        cosines = [path.cosine_centred.p5 for path in paths]
        theta = max(0.0, round(1.0 - (1.0 - min(cosines)) * how.safety_margin, 6))
        delta = max(quantile(path.columns.kl, how.kl_quantile) for path in long) * how.safety_margin
        if not delta > 0:
            raise EquiportError("KL is 0 everywhere", remedy="A port that equals its source shows no spread.")
        positions = sum(path.positions for path in long)
        changes += [
            Change("τ_R end to end", shipped.tau_r, tau, len(long), tau > shipped.tau_r),
            Change("θ", shipped.theta, theta, len(cosines), theta < shipped.theta),
            Change("δ (nats)", shipped.delta, delta, positions, delta > shipped.delta),
        ]
        update = {"tau_r": tau, "theta": theta, "delta": delta, "calibrated": True}
    return shipped.model_copy(update={**update, "tau_r_by_type": {**shipped.tau_r_by_type, **by_type}}), changes


def _limit(values: Sequence[float], how: Calibration) -> float:
    return max(LOWEST_R, round(quantile(values, how.r_quantile) * how.safety_margin, 4))
