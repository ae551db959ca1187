"""The bf16 gate over all comparisons of one component type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf, isnan
from statistics import median

from equiport.compare.comparison import Comparison
from equiport.compare.gates import (
    Figure,
    GateResult,
    exact_gate,
    fp32_gate,
    integrity_gate,
    join,
    outlier_reasons,
    precision_notes,
    single_gate,
)
from equiport.compare.gates_layers import geometric_mean as geometric_mean
from equiport.compare.gates_layers import layers_verdict, seeds_verdict
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict, combine

#: What makes one component: its name, layer, fixture and phase. Its seeds are draws of the same thing.
_Key = tuple[str, int | None, str, str]


def component_gate(comparisons: Sequence[Comparison], thresholds: Thresholds) -> GateResult:
    """The bf16 gate (and the fp32 gate where there is evidence) over the comparisons of one component type.

    - every comparison passes the integrity gate, the outlier limits and, if it has target_fp32, the fp32 gate;
    - comparisons in exact mode are judged by the exact gate and do not enter the means;
    - one comparison: its single R < 1.2; one seed of several components: 1.2 as well, INCONCLUSIVE up to the
      per-component limit;
    - else the geometric mean of R over layers and seeds < 1.10 (or as calibrated for the component type) and over each
      component's seeds < 1.5;
    - no fault of a few layers hides in the mean of all (`R_LAYERS`, from `min_seeds` seeds on): where some layers of a
      component round as the source does and others do not, the others have the type's limit to themselves, over
      their seeds and phases; and no layer's mean over its seeds and phases reaches 1.2.

    Straddling: when the seeds' own geometric means lie on both sides of 1.10 the verdict is INCONCLUSIVE; from
    `decisive_seeds` on, two standard errors of their mean decide. R below `r_floor` counts as `r_floor`.
    An empty list is NOT RUN; a NaN or infinite R fails. More than a tenth of a component's tokens routed within the
    noise is INCONCLUSIVE.
    """
    if not comparisons:
        return join("bf16-components", [])
    parts: list[GateResult] = []
    for c in comparisons:
        parts.append(integrity_gate(c, thresholds))
        evidence = fp32_gate(c, thresholds)
        parts.append(
            evidence
            if evidence.verdict is not Verdict.NOT_RUN
            else GateResult("fp32", Verdict.PASS, blind_spots=evidence.blind_spots)
        )
    ratio = [c for c in comparisons if c.mode == "ratio"]
    parts.extend(exact_gate(c) for c in comparisons if c.mode == "exact")
    if len(ratio) == 1:
        parts.append(single_gate(ratio[0], thresholds))
    elif ratio:
        parts.append(_means(ratio, thresholds))
    parts.extend(_routing(comparisons, thresholds))
    return join("bf16-components", parts)


def _routing(comparisons: Sequence[Comparison], thresholds: Thresholds) -> list[GateResult]:
    """Of components with a router: how many tokens count for nothing in bf16; too many leave too little evidence."""
    routed: dict[str, list[Comparison]] = defaultdict(list)
    for c in comparisons:
        if c.tokens_unsure:
            routed[c.labels.component or c.name].append(c)
    found = []
    for name in routed:
        own = [c for c in comparisons if (c.labels.component or c.name) == name]
        unsure, tokens = sum(c.tokens_unsure for c in own), sum(c.tokens for c in own)
        figure = Figure("unsure_tokens", unsure / tokens, thresholds.unsure_tokens)
        message = f"a router's margin is within the noise at {unsure} of {tokens} tokens: set aside in bf16"
        said = reason(ReasonCode.ROUTER_NOISE, message, name)
        if unsure / tokens > thresholds.unsure_tokens:
            found.append(GateResult("routing", Verdict.INCONCLUSIVE, (said,), (figure,)))
        else:
            found.append(GateResult("routing", Verdict.PASS, (), (figure,), (said,)))
    return found


def _means(comparisons: Sequence[Comparison], thresholds: Thresholds) -> GateResult:
    reasons: list[Reason] = [item for c in comparisons for item in outlier_reasons(c, thresholds)]
    verdicts = [Verdict.FAIL if reasons else Verdict.PASS]
    notes = [item for c in comparisons for item in precision_notes(c, thresholds)]
    broken = [c for c in comparisons if isnan(c.r_ratio) or c.r_ratio == inf]
    if broken:
        reasons.extend(reason(ReasonCode.NON_FINITE_METRIC, f"R is {c.r_ratio}", c.name) for c in broken)
        return GateResult("bf16-components", Verdict.FAIL, tuple(reasons), (), tuple(notes))
    components: dict[_Key, list[Comparison]] = defaultdict(list)
    seeds: dict[int | None, list[Comparison]] = defaultdict(list)
    for c in comparisons:
        labels = c.labels
        components[(labels.component or c.name, labels.layer, labels.fixture, labels.phase)].append(c)
        seeds[labels.seed].append(c)
    for key, draws in components.items():
        verdict, found = _component(key, draws, thresholds)
        verdicts.append(verdict)
        reasons.extend(found)
    verdict, found, figures = _type(list(seeds.values()), thresholds)
    verdicts.append(verdict)
    reasons.extend(found)
    if Verdict.FAIL not in verdicts:  # what a mean tells already needs no second voice
        verdict, found = layers_verdict(comparisons, thresholds)
        verdicts.append(verdict)
        reasons.extend(found)
    values = [c.r_ratio for c in comparisons]
    figures += (
        Figure("r_median", median(values)),
        Figure("r_worst", max(values), None),
        Figure("singles_at_or_above_documented", sum(not value < thresholds.r_single for value in values)),
    )
    return GateResult("bf16-components", combine(verdicts), tuple(reasons), figures, tuple(notes))


def _component(key: _Key, draws: Sequence[Comparison], thresholds: Thresholds) -> tuple[Verdict, list[Reason]]:
    subject = key[0] + (f" (layer {key[1]})" if key[1] is not None else "")
    mean = geometric_mean([c.r_ratio for c in draws], thresholds.r_floor)
    if not mean < thresholds.r_component:
        message = f"geometric mean of R over {len(draws)} draws = {mean:.3g} >= {thresholds.r_component:g}"
        return Verdict.FAIL, [reason(ReasonCode.R_COMPONENT, message, subject)]
    if len({c.labels.seed for c in draws}) == 1 and not max(c.r_ratio for c in draws) < thresholds.r_single:
        message = f"R = {max(c.r_ratio for c in draws):.3g} >= {thresholds.r_single:g} on one seed: draw more seeds"
        return Verdict.INCONCLUSIVE, [reason(ReasonCode.TOO_FEW_SEEDS, message, subject)]
    return Verdict.PASS, []


def _type(
    seeds: Sequence[Sequence[Comparison]], thresholds: Thresholds
) -> tuple[Verdict, list[Reason], tuple[Figure, ...]]:
    kinds = {c.labels.component_type for draws in seeds for c in draws}
    limit = thresholds.component_limit(kinds.pop() if len(kinds) == 1 else "")
    pooled = geometric_mean([c.r_ratio for draws in seeds for c in draws], thresholds.r_floor)
    means = [geometric_mean([c.r_ratio for c in draws], thresholds.r_floor) for draws in seeds]
    figures = (Figure("r_geomean", pooled, limit), Figure("seeds", len(seeds), thresholds.min_seeds))
    verdict, message = seeds_verdict(means, pooled, limit, thresholds)
    if verdict is Verdict.PASS:
        return verdict, [], figures
    code = ReasonCode.R_GEOMEAN if verdict is Verdict.FAIL else ReasonCode.SEEDS_STRADDLE
    return verdict, [reason(code, message)], figures
