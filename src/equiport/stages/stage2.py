"""Stage 2: component tests. Fixtures are traced once, every test file runs alone, the comparator's records decide."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from equiport.audit.experiment import refusals
from equiport.audit.model import Severity
from equiport.audit.report import Finding
from equiport.compare.comparison import Comparison
from equiport.compare.reasons import UNDECIDED, ReasonCode
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.experiment.atomic import write_json
from equiport.stacks.contract import StackAdapter
from equiport.stages.boundaries import settle_boundaries
from equiport.stages.component_check import compare_sample
from equiport.stages.component_evidence import FileEvidence, collect_evidence
from equiport.stages.component_fixtures import TraceManifest, TracePlan, mapping_of, trace_folder, write_trace
from equiport.stages.component_plots import plot_r_per_layer
from equiport.stages.component_rows import (
    ComponentRow,
    component_rows,
    evidence_reasons,
    not_called_reasons,
    plain_rows,
    row_reasons,
)
from equiport.stages.device_classes import device_classes, settle_device_classes
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.generate_tests import generate_tests
from equiport.stages.instances import InstanceRow, instance_rows
from equiport.stages.wrong_ports import notice_wrong_ports
from equiport.structure.mapping import ComponentMapping
from equiport.trace.sample import load_samples
from equiport.warm import FOR_TESTS, warm_server

SPEC = StageSpec(2, "component tests", needs={0: False})
_SEEDS, _MOST_SEEDS = 3, 9


@dataclass(frozen=True)
class Stage2Options:
    """Flags of run_stage2.py."""

    tests_dir: Path
    tau_r: float = 1.2
    timeout: float = 300.0
    generate: bool = False


class ComponentMetrics(BaseModel):
    """What stage 2 measured."""

    tests: int
    comparisons: int
    rows: list[ComponentRow]
    unlabelled: list[ComponentRow]
    uncovered: list[str]
    excitation: list[tuple[str, str, bool, str]]
    plots: list[str]
    instances: list[InstanceRow] = []


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
        lambda context: run_component_tests(context, stage),
        subject=subject,
        adapter=adapter,
        settings={"tau_r": stage.tau_r, "timeout": stage.timeout, "generate": stage.generate},
    )


def run_component_tests(context: StageContext, stage: Stage2Options) -> Outcome:
    """Trace, run the tests, judge the records; stage 4 does the same on a patched port."""
    warm_server(FOR_TESTS).start()  # its imports go on while fixtures are traced
    experiment, seeds = context.experiment, [context.options.seed + number for number in range(_SEEDS)]
    manifest, mapping = None, None
    if experiment is not None and context.subject is not None:
        mapping = mapping_of(experiment)
        manifest = _trace(context, seeds, append=False)
        if stage.generate:
            written = generate_tests(stage.tests_dir, mapping, context.port.model_path, manifest.untestable)
            context.progress.line(f"{len(written)} test files written to {stage.tests_dir.name}/")
    files = sorted(stage.tests_dir.glob("test_*.py"))
    logs = (experiment.results if experiment else stage.tests_dir.parent) / "stage2_logs"
    limits = context.options.thresholds
    with context.progress.step(f"run {len(files)} test files"):
        evidence = {item.file: item for item in collect_evidence(files, stage.timeout, logs, limits)}
    thresholds = context.thresholds.model_copy(update={"r_single": stage.tau_r})
    rows = component_rows(evidence.values(), thresholds)
    while experiment and manifest and _undecided(rows, thresholds) and len(seeds) < _MOST_SEEDS:
        more = [seeds[-1] + 1 + number for number in range(_SEEDS)]
        context.progress.line(f"seeds straddle a threshold: drawing seeds {more}")
        manifest, seeds = _trace(context, more, append=True), [*seeds, *more]
        again = [stage.tests_dir / name for name in _files_of(_undecided(rows, thresholds), evidence)]
        evidence.update({item.file: item for item in collect_evidence(again, stage.timeout, logs, limits)})
        rows = component_rows(evidence.values(), thresholds)
    instances = instance_rows((record for item in evidence.values() for record in item.records), thresholds)
    if mapping is not None:
        rows = settle_boundaries(rows, instances, mapping)
        if experiment is not None:
            rows = settle_device_classes(rows, instances, device_classes(experiment, mapping), thresholds)
    faults = _wrong_ports(context, stage.tests_dir, rows, manifest)
    outcome = _outcome(context, evidence, rows, instances, thresholds, mapping, manifest)
    _refuse(outcome, context, stage.tests_dir, faults)
    outcome.seeds = seeds
    outcome.inputs = [*sorted(stage.tests_dir.glob("*.py")), *([experiment.mapping_file] if experiment else [])]
    return outcome


def _wrong_ports(
    context: StageContext, tests: Path, rows: Sequence[ComponentRow], manifest: TraceManifest | None
) -> list[Finding]:
    """What the audit finds when it makes the port wrong; only where it passes as it is."""
    experiment = context.experiment
    if experiment is None or manifest is None or any(row.verdict is Verdict.FAIL for row in rows):
        return []
    with context.progress.step("try wrong ports"):
        patched = context.options.patches_dir is not None
        components = list(dict.fromkeys(row.component for row in rows if not row.boundary))
        return notice_wrong_ports(experiment, tests, components, patched=patched)


def _refuse(outcome: Outcome, context: StageContext, tests: Path, faults: Sequence[Finding]) -> None:
    """Test files with errors of the audit are no evidence, whatever they recorded."""
    port = context.subject.classes.modeling_file if context.subject else None
    root = context.experiment.root if context.experiment else tests.parent
    errors = [item for item in faults if item.severity is Severity.ERROR]
    for item in [*refusals(tests, port, root), *errors]:
        where = f"{item.file}:{item.line}"
        outcome.reasons = [*outcome.reasons, Reason("AUDIT_FINDING", f"{item.rule}: {item.message}", where)]
        outcome.verdict = Verdict.FAIL


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


def _undecided(rows: Sequence[ComponentRow], thresholds: Thresholds) -> list[ComponentRow]:
    return [row for row in rows if row.verdict is Verdict.INCONCLUSIVE and not row.too_unsure(thresholds)]


def _files_of(rows: Sequence[ComponentRow], evidence: dict[str, FileEvidence]) -> list[str]:
    types = {row.component_type for row in rows}
    return [name for name, item in evidence.items() if any(r.labels.component_type in types for r in item.records)]


def _outcome(
    context: StageContext,
    evidence: dict[str, FileEvidence],
    rows: list[ComponentRow],
    instances: list[InstanceRow],
    thresholds: Thresholds,
    mapping: ComponentMapping | None,
    manifest: TraceManifest | None,
) -> Outcome:
    items = list(evidence.values())
    plain, blind = plain_rows(items, thresholds)
    not_called = manifest.not_called if manifest else []
    reasons = [*not_called_reasons(rows, not_called), *row_reasons([*rows, *plain], thresholds)]
    comparisons = sum(len(item.records) for item in items)
    if not items:
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, "the tests folder holds no test_*.py"))
    elif not comparisons:
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, "no test compared anything"))
    reasons += evidence_reasons(items, rows)
    covered = {row.component for row in rows}
    blind += [
        f"{row.component}: differs from the source's module of this place; the same as a whole in {row.boundary}"
        for row in rows
        if row.boundary
    ]
    uncovered = [e.name for e in mapping.tested if e.name not in covered] if mapping else []
    if manifest is not None:
        reasons += [Reason("LOAD_MISSING", "is not loaded as it should be", key) for key in manifest.load_findings]
        # what one kind of weights excites is seen there
        somewhere = {what for _, what, seen, _ in manifest.excitation if seen}
        blind += [
            f"{kind}: not excited: {what} ({detail})"
            for kind, what, _, detail in manifest.excitation
            if what not in somewhere
        ]
        blind += [*manifest.notes, *(f"{name}: {text}" for name, text in manifest.untestable.items())]
    gaps = [name for name in uncovered if manifest is None or name not in manifest.untestable]
    open_points = [Reason("NOT_COVERED", "is mapped and no test compares it", name) for name in gaps]
    undecided = [reason for reason in reasons if reason.code in UNDECIDED]
    failed = len(reasons) > len(undecided)
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if undecided or open_points else Verdict.PASS
    plots = _plots(context, rows, items)
    if context.experiment is not None:
        write_json(
            context.experiment.results / "comparisons.json",
            [record for item in items for record in item.records],
        )
        if verdict is Verdict.PASS:  # else stage 3 tries its hypotheses on it
            shutil.rmtree(trace_folder(context.experiment), ignore_errors=True)
    metrics = ComponentMetrics(
        tests=sum(item.tests for item in items),
        comparisons=comparisons,
        rows=rows,
        unlabelled=plain,
        uncovered=uncovered,
        excitation=manifest.excitation if manifest else [],
        plots=plots,
        instances=instances,
    )
    return Outcome(verdict, [*reasons, *open_points], metrics, list(dict.fromkeys(blind)))


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
