"""Stage 2: component tests. Fixtures are traced once, every test file runs alone, the comparator's records decide."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from equiport.compare.comparison import Comparison
from equiport.compare.gates import GateResult, fp32_gate, judge
from equiport.compare.gates_components import component_gate
from equiport.compare.reasons import ReasonCode
from equiport.compare.records import Record
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict, combine
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.experiment.atomic import write_json
from equiport.stacks.contract import StackAdapter
from equiport.stages.component_check import compare_sample
from equiport.stages.component_evidence import FileEvidence, collect_evidence
from equiport.stages.component_fixtures import TraceManifest, TracePlan, mapping_of, trace_folder, write_trace
from equiport.stages.component_plots import plot_r_per_layer
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.generate_tests import generate_tests
from equiport.structure.mapping import ComponentMapping
from equiport.trace.sample import load_samples

SPEC = StageSpec(2, "component tests", needs={0: False})
_SEEDS, _MOST_SEEDS = 3, 9


@dataclass(frozen=True)
class Stage2Options:
    """Flags of run_stage2.py."""

    tests_dir: Path
    tau_r: float = 1.2
    timeout: float = 300.0
    generate: bool = False


class ComponentRow(BaseModel):
    """One component (over its layers), one fixture: what the report's table shows."""

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


class ComponentMetrics(BaseModel):
    """What stage 2 measured."""

    tests: int
    comparisons: int
    rows: list[ComponentRow]
    unlabelled: list[ComponentRow]
    uncovered: list[str]
    excitation: list[tuple[str, str, bool, str]]
    plots: list[str]


def run(
    options: StageOptions, stage: Stage2Options, subject: Subject | None, adapter: StackAdapter | None
) -> StageResult:
    """Run stage 2.

    Raises:
        EquiportError: the tests folder is missing (and --generate is not given), or the port does not run.
    """
    if not stage.tests_dir.is_dir() and not stage.generate:
        raise EquiportError(
            "no such tests folder", where=stage.tests_dir, remedy="Write component tests, or add --generate."
        )
    return run_stage(
        SPEC,
        options,
        lambda context: _body(context, stage),
        subject=subject,
        adapter=adapter,
        settings={"tau_r": stage.tau_r, "timeout": stage.timeout, "generate": stage.generate},
    )


def _body(context: StageContext, stage: Stage2Options) -> Outcome:
    experiment, seeds = context.experiment, [context.options.seed + number for number in range(_SEEDS)]
    manifest, mapping = None, None
    if experiment is not None and context.subject is not None:
        mapping = mapping_of(experiment)
        manifest = _trace(context, seeds, append=False)
        if stage.generate:
            skip = {**manifest.untestable}
            written = generate_tests(stage.tests_dir, mapping, context.port.model_path, skip)
            context.progress.line(f"{len(written)} test files written to {stage.tests_dir.name}/")
    files = sorted(stage.tests_dir.glob("test_*.py"))
    logs = (experiment.results if experiment else stage.tests_dir.parent) / "stage2_logs"
    with context.progress.step(f"run {len(files)} test files"):
        evidence = {item.file: item for item in collect_evidence(files, stage.timeout, logs)}
    thresholds = context.thresholds.model_copy(update={"r_single": stage.tau_r})
    rows = _rows(evidence.values(), thresholds)
    while experiment and manifest and _undecided(rows) and len(seeds) < _MOST_SEEDS:
        more = [seeds[-1] + 1 + number for number in range(_SEEDS)]
        context.progress.line(f"seeds straddle a threshold: drawing seeds {more}")
        manifest, seeds = _trace(context, more, append=True), [*seeds, *more]
        again = [stage.tests_dir / name for name in _files_of(_undecided(rows), evidence)]
        evidence.update({item.file: item for item in collect_evidence(again, stage.timeout, logs)})
        rows = _rows(evidence.values(), thresholds)
    outcome = _outcome(context, evidence, rows, thresholds, mapping, manifest)
    outcome.seeds = seeds
    outcome.inputs = [*files, *([experiment.mapping_file] if experiment else [])]
    return outcome


def _trace(context: StageContext, seeds: Sequence[int], *, append: bool) -> TraceManifest:
    assert context.experiment is not None
    return write_trace(
        context.experiment,
        context.port,
        context.stack,
        context.weights_folder(),
        TracePlan(tuple(seeds)),
        context.progress,
        append=append,
    )


def _undecided(rows: Sequence[ComponentRow]) -> list[ComponentRow]:
    return [row for row in rows if row.verdict is Verdict.INCONCLUSIVE]


def _files_of(rows: Sequence[ComponentRow], evidence: dict[str, FileEvidence]) -> list[str]:
    types = {row.component_type for row in rows}
    return [name for name, item in evidence.items() if any(r.labels.component_type in types for r in item.records)]


def _rows(evidence: Sequence[FileEvidence] | object, thresholds: Thresholds) -> list[ComponentRow]:
    """One row a component and fixture. The bf16 mean is taken over the component type, as its gate wants."""
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for item in evidence:  # type: ignore[attr-defined]
        for record in item.records:
            if record.labels.component and record.comparison is not None:
                groups[(record.labels.component_type, record.labels.fixture)].append(record.comparison)
    rows = []
    for (kind, fixture), comparisons in groups.items():
        by_component: dict[str, list[Comparison]] = defaultdict(list)
        for comparison in comparisons:
            by_component[comparison.labels.component].append(comparison)
        shared = component_gate(comparisons, thresholds)
        for component, own in by_component.items():
            rows.append(_row(component, kind, fixture, own, shared, thresholds))
    return rows


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


def _unlabelled(evidence: Sequence[FileEvidence], thresholds: Thresholds) -> tuple[list[ComponentRow], list[str]]:
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


def _outcome(
    context: StageContext,
    evidence: dict[str, FileEvidence],
    rows: list[ComponentRow],
    thresholds: Thresholds,
    mapping: ComponentMapping | None,
    manifest: TraceManifest | None,
) -> Outcome:
    items = list(evidence.values())
    plain, blind = _unlabelled(items, thresholds)
    reasons = _row_reasons([*rows, *plain], items, thresholds)
    comparisons = sum(len(item.records) for item in items)
    if not items:
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, "the tests folder holds no test_*.py"))
    elif not comparisons:
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, "no test compared anything"))
    known = {(reason.code, reason.subject) for reason in reasons}
    reasons += [reason for item in items for reason in item.reasons if (reason.code, reason.subject) not in known]
    covered = {row.component for row in rows}
    uncovered = [e.name for e in mapping.components if e.name not in covered] if mapping else []
    if manifest is not None:
        reasons += [Reason("NEVER_CALLED", text, name) for name, text in manifest.faults.items()]
        reasons += [Reason("LOAD_MISSING", "is not loaded as it should be", key) for key in manifest.load_findings]
        blind += [
            f"{kind}: not excited: {what} ({detail})" for kind, what, seen, detail in manifest.excitation if not seen
        ]
        blind += [*manifest.notes, *(f"{name}: {text}" for name, text in manifest.untestable.items())]
    gaps = [name for name in uncovered if manifest is None or name not in {**manifest.untestable, **manifest.faults}]
    open_points = [Reason("NOT_COVERED", "is mapped and no test compares it", name) for name in gaps]
    verdicts = [*(row.verdict for row in (*rows, *plain)), *(Verdict.FAIL for _ in reasons)]
    if open_points:
        verdicts.append(Verdict.INCONCLUSIVE)
    undecided = any(row.verdict is Verdict.INCONCLUSIVE for row in rows)
    hard = [reason for reason in reasons if reason.code not in (ReasonCode.SEEDS_STRADDLE.value,)]
    verdict = combine(verdicts) if hard or not undecided else Verdict.INCONCLUSIVE
    plots = _plots(context, rows, items)
    if context.experiment is not None:
        write_json(
            context.experiment.results / "comparisons.json",
            [record.model_dump(mode="json") for item in items for record in item.records],
        )
        shutil.rmtree(trace_folder(context.experiment), ignore_errors=verdict is Verdict.PASS)
    metrics = ComponentMetrics(
        tests=sum(item.tests for item in items),
        comparisons=comparisons,
        rows=rows,
        unlabelled=plain,
        uncovered=uncovered,
        excitation=manifest.excitation if manifest else [],
        plots=plots,
    )
    return Outcome(verdict, [*reasons, *open_points], metrics, list(dict.fromkeys(blind)))


def _row_reasons(rows: Sequence[ComponentRow], items: Sequence[FileEvidence], thresholds: Thresholds) -> list[Reason]:
    reasons = []
    for row in rows:
        if row.verdict is Verdict.FAIL or row.verdict is Verdict.INCONCLUSIVE:
            code = "COMPONENT_FAILS" if row.verdict is Verdict.FAIL else ReasonCode.SEEDS_STRADDLE.value
            figures = (
                f"R32 worst {_figure(row.r32_worst)}, R mean {_figure(row.r_geomean)}, R worst {_figure(row.r_worst)}"
            )
            reasons.append(Reason(code, f"{row.fixture} weights: {figures}; first at {row.first_bad}", row.component))
    return reasons


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _plots(context: StageContext, rows: Sequence[ComponentRow], items: Sequence[FileEvidence]) -> list[str]:
    """R and R32 per layer over all components; error plots of the worst comparison of each component type."""
    experiment = context.experiment
    if experiment is None:
        return []
    found = [r.comparison for item in items for r in item.records if r.comparison and r.labels.component]
    if not found:
        return []
    paths = [plot_r_per_layer(found, experiment.plots)]
    worst: dict[str, Comparison] = {}
    for item in found:
        kept = worst.get(item.labels.component_type)
        if kept is None or _badness(item) > _badness(kept):
            worst[item.labels.component_type] = item
    for item in worst.values():
        for sample in load_samples(trace_folder(experiment), item.labels.component):
            if sample.name == item.name:
                paths += [Path(path) for path in compare_sample(sample, experiment.plots).plots]
                break
    return [str(path.relative_to(experiment.root)) for path in paths]


def _badness(comparison: Comparison) -> tuple[float, float]:
    return (comparison.r32 or 0.0, comparison.r_ratio)
