"""Layers that round otherwise than their siblings: a fault of a few must not hide in the mean of all.

Right code, measured over 64 experiments: in a phase, a component's layers are bit-equal to the source all together or
not at all (2 of 4725 components, fixtures and phases are mixed, both with R = 1.00), and a layer's mean of R over seeds
and phases reaches 1.12. A variance taken in bf16 by one layer's norm measures 1.29 to 1.35, beside others at 1.00.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import exp, inf, isnan, log, nan, sqrt
from statistics import fmean, stdev

from equiport.compare.comparison import Comparison
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict, combine

#: R of a computation that rounds as the source does is 1 up to its own last digits.
_BIT_EQUAL = 1e-3
_Layers = dict[int, list[Comparison]]
_Judged = tuple[list[int], Verdict, str]


def layers_verdict(comparisons: Iterable[Comparison], thresholds: Thresholds) -> tuple[Verdict, list[Reason]]:
    """The layers of each component and fixture against their siblings, R pooled over seeds and phases; finite R only.

    PASS where there is one layer alone, or fewer than `min_seeds` seeds of it. A verdict that its seeds do not agree on
    is INCONCLUSIVE, as in the type's gate.
    """
    components: dict[tuple[str, str], _Layers] = defaultdict(lambda: defaultdict(list))
    for c in comparisons:
        if c.labels.layer is not None:
            components[(c.labels.component or c.name, c.labels.fixture)][c.labels.layer].append(c)
    verdicts, reasons = [Verdict.PASS], []
    for (name, _), layers in components.items():
        if len(layers) < 2:
            continue
        told: set[int] = set()
        for kind, verdict, message in (*_kinds(layers, thresholds), *_singles(layers, thresholds)):
            if verdict is Verdict.PASS or told.issuperset(kind):
                continue
            verdicts.append(verdict)
            reasons.append(_reason(verdict, name, kind, message))
            if verdict is Verdict.FAIL:
                told.update(kind)
    return combine(verdicts), reasons


def _kinds(layers: _Layers, thresholds: Thresholds) -> Iterator[_Judged]:
    """Layers by the phases in which every draw of them rounds as the source's; of more than one kind each by itself."""
    kinds: dict[frozenset[str], list[int]] = defaultdict(list)
    for layer, draws in layers.items():
        phases = {c.labels.phase for c in draws}
        loud = {c.labels.phase for c in draws if abs(c.r_ratio - 1) > _BIT_EQUAL}
        kinds[frozenset(phases - loud)].append(layer)
    for kind in kinds.values() if len(kinds) > 1 else ():
        draws = [c for layer in kind for c in layers[layer]]
        limit = thresholds.component_limit(draws[0].labels.component_type)
        verdict, message = _seeds(draws, limit, thresholds)
        yield kind, verdict, f"{message}; {len(layers) - len(kind)} other layers round otherwise"


def _singles(layers: _Layers, thresholds: Thresholds) -> Iterator[_Judged]:
    for layer, draws in layers.items():
        limit = max(thresholds.r_layer, thresholds.component_limit(draws[0].labels.component_type))
        # a single seed beyond is luck: only a mean beyond asks for more
        if geometric_mean([c.r_ratio for c in draws], thresholds.r_floor) >= limit:
            yield [layer], *_seeds(draws, limit, thresholds)


def _seeds(draws: Sequence[Comparison], limit: float, thresholds: Thresholds) -> tuple[Verdict, str]:
    seeds: dict[int | None, list[float]] = defaultdict(list)
    for c in draws:
        seeds[c.labels.seed].append(c.r_ratio)
    if len(seeds) < thresholds.min_seeds:
        return Verdict.PASS, ""
    means = [geometric_mean(values, thresholds.r_floor) for values in seeds.values()]
    pooled = geometric_mean([c.r_ratio for c in draws], thresholds.r_floor)
    return seeds_verdict(means, pooled, limit, thresholds)


def _reason(verdict: Verdict, name: str, layers: Sequence[int], message: str) -> Reason:
    code = ReasonCode.R_LAYERS if verdict is Verdict.FAIL else ReasonCode.TOO_FEW_SEEDS
    numbers = ", ".join(str(layer) for layer in sorted(layers))
    return reason(code, message, f"{name} (layer{'s' if len(layers) > 1 else ''} {numbers})")


def seeds_verdict(means: Sequence[float], pooled: float, limit: float, thresholds: Thresholds) -> tuple[Verdict, str]:
    """Whether R lies below `limit`, by each seed's own geometric mean; what to say where it does not.

    All seeds on one side decide. Else it is INCONCLUSIVE until, from `decisive_seeds` on, two standard errors of their
    mean lie on one side.
    """
    below = sum(mean < limit for mean in means)
    if below == len(means):
        return Verdict.PASS, ""
    over = f"geometric mean of R over {len(means)} seeds = {pooled:.3g} >= {limit:g}"
    if below == 0:
        return Verdict.FAIL, over
    if len(means) >= thresholds.decisive_seeds:
        logs = [log(mean) for mean in means]
        margin = 2 * stdev(logs) / sqrt(len(logs))
        if exp(fmean(logs) + margin) < limit and pooled < limit:
            return Verdict.PASS, ""
        if exp(fmean(logs) - margin) >= limit:
            return Verdict.FAIL, over
    return Verdict.INCONCLUSIVE, f"{below} of {len(means)} seeds below {limit:g}, pooled {pooled:.3g}: draw more seeds"


def geometric_mean(values: Sequence[float], floor: float) -> float:
    """Geometric mean with small values raised to `floor`; NaN for an empty list or a NaN in it."""
    if not values or any(isnan(value) for value in values):
        return nan
    return exp(fmean(log(max(value, floor)) if value != inf else inf for value in values))
