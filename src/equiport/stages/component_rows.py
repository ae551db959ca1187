"""Rows of stage 2: what the records of each component say under each fixture, and the reasons that follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from equiport.compare.comparison import Comparison
from equiport.compare.gates import GateResult, fp32_gate, judge
from equiport.compare.gates_components import component_gate
from equiport.compare.reasons import ReasonCode
from equiport.compare.records import Record
from equiport.compare.thresholds import SHIPPED_THRESHOLDS, Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.stages.component_evidence import FileEvidence
from equiport.stages.generate_tests import component_rank

_Group = tuple[str, str]


class ComponentRow(BaseModel):
    """One component (over its layers), one fixture: what the report's table shows.

    `boundary`: it differs from the source's module of this place, and what is named here, around it, does not.
    `device_class`: it only rounds more than its source, and is built on the CPU alone; the device builds this instead.
    """

    component: str
    component_type: str
    fixture: str
    comparisons: int
    verdict: Verdict
    r_geomean: float | None
    r_worst: float | None
    r32_worst: float | None
    r32_slice_worst: float | None
    singles_over_documented: int
    exact: int
    first_bad: str
    tokens: int = 0
    tokens_unsure: int = 0
    boundary: str = ""
    device_class: str = ""

    def too_unsure(self, thresholds: Thresholds) -> bool:
        """Whether routers left too few tokens for a verdict: more seeds would not help."""
        return self.tokens_unsure > thresholds.unsure_tokens * self.tokens


def component_rows(evidence: Iterable[FileEvidence], thresholds: Thresholds) -> list[ComponentRow]:
    """One row a component and fixture. The bf16 mean is taken over the component type, as its gate wants.

    A record whose tensors could not be compared makes a failing row of its own.
    """
    groups: dict[_Group, list[Comparison]] = defaultdict(list)
    refused: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for item in evidence:
        for record in item.records:
            labels = record.labels
            if labels.component and record.comparison is None:
                refused[(labels.component, labels.component_type, labels.fixture)].append(record)
            elif labels.component and record.comparison is not None:
                groups[(labels.component_type, labels.fixture)].append(record.comparison)
    rows = [_refused_row(*key, records) for key, records in refused.items()]
    for (kind, fixture), comparisons in groups.items():
        by_component: dict[str, list[Comparison]] = defaultdict(list)
        for comparison in comparisons:
            by_component[comparison.labels.component].append(comparison)
        shared = component_gate(comparisons, thresholds)
        for component, own in by_component.items():
            rows.append(_row(component, kind, fixture, own, shared, thresholds))
    return rows


def _refused_row(component: str, kind: str, fixture: str, records: Sequence[Record]) -> ComponentRow:
    said = records[0].reasons[0].message if records[0].reasons else "could not be compared"
    return ComponentRow(
        component=component,
        component_type=kind,
        fixture=fixture,
        comparisons=len(records),
        verdict=Verdict.FAIL,
        r_geomean=None,
        r_worst=None,
        r32_worst=None,
        r32_slice_worst=None,
        singles_over_documented=0,
        exact=0,
        first_bad=f"{records[0].name}: {said}",
    )


def evidence_reasons(evidence: Iterable[FileEvidence], rows: Sequence[ComponentRow]) -> list[Reason]:
    """What forbids to believe a test file. A failed test whose components have failing rows already is left out, and
    so are shapes that differ where what is around the component proves it right."""
    explained = {row.component for row in rows if row.verdict is not Verdict.PASS or row.boundary}
    settled = {row.component for row in rows if row.boundary}
    settled -= {row.component for row in rows if row.verdict is not Verdict.PASS}
    found = []
    for item in evidence:
        padded = {record.name for record in item.records if record.labels.component in settled and _shaped(record)}
        for reason in item.reasons:
            test = reason.subject.split("::", 1)[-1]
            spoken = {r.labels.component for r in item.records if r.test.split("::", 1)[-1] == test}
            if reason.code == "TEST_FAILED" and spoken & explained:
                continue
            if reason.code == "COMPARISON_REFUSED" and reason.subject in padded:
                continue
            found.append(reason)
    return found


def _shaped(record: Record) -> bool:
    """Refused for its shape and for nothing else."""
    codes = {reason.code for reason in record.reasons}
    return record.comparison is None and codes == {ReasonCode.SHAPE_MISMATCH.value}


def _row(
    component: str,
    kind: str,
    fixture: str,
    own: Sequence[Comparison],
    shared: GateResult,
    thresholds: Thresholds,
) -> ComponentRow:
    result = component_gate(own, thresholds)
    ratios = [item.r_ratio for item in own if item.mode == "ratio"]
    r32 = [item.r32 for item in own if item.r32 is not None]
    slices = [item.r32_slice.ratio for item in own if item.r32_slice]
    verdict = result.verdict
    # a type that fails only together (its mean) is the fault of its worst component
    if verdict is Verdict.PASS and shared.verdict is not Verdict.PASS and not _fails_alone(shared):
        verdict = shared.verdict
    figures = {figure.name: figure.value for figure in result.figures}
    return ComponentRow(
        component=component,
        component_type=kind,
        fixture=fixture,
        comparisons=len(own),
        verdict=verdict,
        r_geomean=figures.get("r_geomean", ratios[0] if len(ratios) == 1 else None),
        r_worst=max(ratios, default=None),
        r32_worst=max(r32, default=None),
        r32_slice_worst=max(slices, default=None),
        singles_over_documented=sum(not ratio < thresholds.r_single for ratio in ratios),
        exact=sum(item.mode == "exact" for item in own),
        first_bad=_first_bad(own, result, thresholds),
        tokens=sum(item.tokens for item in own),
        tokens_unsure=sum(item.tokens_unsure for item in own),
    )


def _fails_alone(shared: GateResult) -> bool:
    """Whether the type's failure names components; then those rows carry it already."""
    means = {ReasonCode.R_GEOMEAN.value, ReasonCode.SEEDS_STRADDLE.value}
    return any(reason.code not in means for reason in shared.reasons)


def _first_bad(own: Sequence[Comparison], result: GateResult, thresholds: Thresholds) -> str:
    if result.verdict is Verdict.PASS:
        return ""
    ordered = sorted(own, key=lambda item: item.labels.layer if item.labels.layer is not None else -1)
    for item in ordered:
        if judge(item, thresholds, thresholds.r_component).verdict is Verdict.FAIL:
            return item.name
        if fp32_gate(item, thresholds).verdict is Verdict.FAIL:
            return item.name
    return result.reasons[0].subject if result.reasons else ""


def plain_rows(evidence: Iterable[FileEvidence], thresholds: Thresholds) -> tuple[list[ComponentRow], list[str]]:
    """Records of hand-written tests: each passes its own gate; the tolerance is the stage's, not the test's."""
    rows, blind = [], []
    for item in evidence:
        for record in item.records:
            if record.labels.component:
                continue
            result = record.judged(thresholds, thresholds.r_single)
            blind += [f"{record.name}: {spot.message}" for spot in result.blind_spots]
            rows.append(_plain_row(record, result))
    return rows, blind


def _plain_row(record: Record, result: GateResult) -> ComponentRow:
    found = record.comparison
    return ComponentRow(
        component=record.name,
        component_type="",
        fixture="hand-written",
        comparisons=1,
        verdict=result.verdict,
        r_geomean=found.r_ratio if found else None,
        r_worst=found.r_ratio if found else None,
        r32_worst=found.r32 if found else None,
        r32_slice_worst=found.r32_slice.ratio if found and found.r32_slice else None,
        singles_over_documented=int(bool(found) and result.verdict is Verdict.FAIL),
        exact=int(bool(found and found.mode == "exact")),
        first_bad=result.reasons[0].message if result.reasons else "",
    )


def not_called_reasons(rows: Sequence[ComponentRow], not_called: Sequence[str]) -> list[Reason]:
    """Modules that the port passes by, where the module around them fails: the likely cause, named first."""
    failing = [row.component for row in rows if row.verdict is Verdict.FAIL]
    return [
        Reason("NOT_CALLED", "is not called by the port, and the module around it fails", name)
        for name in not_called
        if any(name.startswith(around + ".") for around in failing)
    ]


def row_reasons(rows: Sequence[ComponentRow], thresholds: Thresholds = SHIPPED_THRESHOLDS) -> list[Reason]:
    """One reason a failing or undecided component and fixture, the simplest components first."""
    reasons = []
    for row in sorted(rows, key=lambda row: component_rank(row.component_type)):
        if row.verdict is Verdict.INCONCLUSIVE and row.too_unsure(thresholds):
            said = (
                f"{row.fixture} weights: a router's margin is within the noise at {row.tokens_unsure} of {row.tokens}"
            )
            reasons.append(Reason(ReasonCode.ROUTER_NOISE.value, f"{said} tokens", row.component))
            continue
        if row.verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
            code = "COMPONENT_FAILS" if row.verdict is Verdict.FAIL else ReasonCode.SEEDS_STRADDLE.value
            code = ReasonCode.CPU_CLASS.value if row.device_class else code
            figures = (
                f"R32 worst {_figure(row.r32_worst)}, R mean {_figure(row.r_geomean)}, R worst {_figure(row.r_worst)}"
            )
            first = f"; first at {row.first_bad}" if row.first_bad else ""
            message = f"{row.fixture} weights: {figures}{first}"
            if row.device_class:
                message += f". It is built on the CPU alone: test {row.device_class} on the device"
            reasons.append(Reason(code, message, row.component))
    return reasons


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
