"""Stage 3: where divergence begins. Change points along the layers, suspects ranked, causes by magnitude.

Each suspect has a class by magnitude, as documented; and a proven cause where a hypothesis gives the port's output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment, StageResult, load_result
from equiport.stacks.contract import StackAdapter
from equiport.stages.causes import CauseReport, prove_causes
from equiport.stages.change_points import Pattern, change_points
from equiport.stages.component_fixtures import mapping_of, trace_folder
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.generate_tests import component_rank
from equiport.stages.instances import InstanceRow
from equiport.stages.stage2 import ComponentMetrics
from equiport.stages.traced_run import TracedRuns, traced_runs

_PROVEN = 6
SPEC = StageSpec(3, "fault localisation", needs={2: False})


class Suspect(BaseModel):
    """One suspect. `consequences`: failing components around it that its fault explains."""

    rank: int
    component: str
    layer: int | None
    fixture: str
    phase: str
    pattern: Pattern
    r_ratio: float | None
    r32: float | None
    root_cause: str
    description: str
    source_modules: list[str]
    target_modules: list[str]
    consequences: list[str]
    cause: CauseReport | None = None


class LocalisationMetrics(BaseModel):
    """Ranked suspects; failing components that none of them covers; the traced run and its first bad places."""

    failing: list[str]
    suspects: list[Suspect]
    without_suspect: list[str]
    traced: TracedRuns = TracedRuns()


@dataclass(frozen=True)
class _Fault:
    """The worst change point of one component over its fixtures and phases."""

    component: str
    row: InstanceRow
    pattern: Pattern


def run(
    options: StageOptions,
    stage2_output: Path,
    tau_r: float,
    subject: Subject | None = None,
    adapter: StackAdapter | None = None,
) -> StageResult:
    """Rank suspects from a stage 2 result; with an adapter both models run once more, traced.

    Raises:
        EquiportError: the file is missing or no stage 2 result.
    """
    result = load_result(stage2_output)
    if result.stage != 2:
        raise EquiportError(f"is a result of stage {result.stage}", where=stage2_output, remedy="Give stage2.json.")
    try:
        metrics = ComponentMetrics.model_validate(result.metrics)
    except ValidationError as error:
        raise EquiportError(
            f"holds no component metrics: {error.errors()[0]['msg']}", where=stage2_output, remedy="Run stage 2 again."
        ) from None
    return run_stage(
        SPEC,
        options,
        lambda context: _body(context, result, metrics, stage2_output, tau_r),
        subject=subject,
        adapter=adapter,
        settings={"tau_r": tau_r},
    )


def _body(context: StageContext, stage2: StageResult, metrics: ComponentMetrics, file: Path, tau_r: float) -> Outcome:
    thresholds = context.thresholds.model_copy(update={"r_single": tau_r})
    if stage2.verdict is Verdict.PASS:
        return _after_pass(context, file, thresholds)
    rows = (*metrics.rows, *metrics.unlabelled)
    failing = list(dict.fromkeys(row.component for row in rows if row.verdict is not Verdict.PASS))
    undecided = set(failing) - {row.component for row in rows if row.verdict is Verdict.FAIL}
    faults = _faults(metrics.instances, failing, thresholds)
    suspects = _suspects(context, faults, thresholds, undecided)
    _prove(context, suspects, metrics.instances, thresholds)
    traced = traced_runs(context, thresholds, long=False)
    _tell(context, traced)
    named = {suspect.component for suspect in suspects} | {c for s in suspects for c in s.consequences}
    missing = [component for component in failing if component not in named]
    for suspect in suspects[:5]:
        place = f" layer {suspect.layer}" if suspect.layer is not None else ""
        context.progress.line(
            f"{suspect.rank}. {suspect.component}{place}, {suspect.phase or 'tables'}, {suspect.pattern.value}: "
            f"{suspect.root_cause}"
        )
        if suspect.cause is not None:
            context.progress.line(f"   {in_words(suspect.cause)}")
    found = LocalisationMetrics(failing=failing, suspects=suspects, without_suspect=missing, traced=traced)
    reasons = [Reason("NO_SUSPECT", "fails and no change point names it", name) for name in missing]
    if not failing:
        reasons.append(Reason("NO_SUSPECT", "stage 2 failed on its evidence, not on a component"))
    return Outcome(Verdict.FAIL if reasons else Verdict.PASS, reasons, found, inputs=[file])


def _after_pass(context: StageContext, file: Path, thresholds: Thresholds) -> Outcome:
    """Where the components pass and the model as a whole does not, the traced run of longer sequences must tell."""
    empty = LocalisationMetrics(failing=[], suspects=[], without_suspect=[])
    end_to_end = failed_end_to_end(context.experiment)
    if end_to_end is None:
        context.progress.line("stage 2 passed: nothing to localise")
        return Outcome(Verdict.PASS, (), empty, inputs=[file])
    empty.traced = traced_runs(context, thresholds, long=True)
    _tell(context, empty.traced)
    said = empty.traced.note or "stage 5 fails, and no module leaves its limits in the traced run"
    reasons = [] if empty.traced.names_a_place else [Reason("NO_SUSPECT", said)]
    return Outcome(Verdict.FAIL if reasons else Verdict.PASS, reasons, empty, inputs=[file, end_to_end])


def failed_end_to_end(experiment: Experiment | None) -> Path | None:
    """stage5.json or stage6.json, the first that fails and is fresh; None where neither does."""
    for stage in (5, 6) if experiment else ():
        assert experiment is not None
        result = experiment.result(stage)
        if result is not None and result.verdict is Verdict.FAIL and experiment.freshness(stage).fresh:
            return experiment.result_path(stage)
    return None


def _tell(context: StageContext, traced: TracedRuns) -> None:
    if traced.note:
        context.progress.line(f"traced run: {traced.note}")
    for run in traced.runs:
        for item in run.first_bad:
            layer = f"layer {item.layer}, " if item.layer is not None else ""
            context.progress.line(
                f"{run.fixture}, {item.view} view: first bad is {layer}{item.module} ({item.phase}): {item.rule}"
            )
        if not run.first_bad:
            context.progress.line(f"{run.fixture} weights: no module leaves its limits in the traced run")


def _prove(
    context: StageContext, suspects: Sequence[Suspect], instances: Sequence[InstanceRow], thresholds: Thresholds
) -> None:
    """Try the hypotheses on the first suspects; where the trace is gone there is nothing to try them on."""
    if context.experiment is None or not (trace_folder(context.experiment) / "manifest.json").is_file():
        return
    with context.progress.step("hypotheses"):
        for suspect in suspects[:_PROVEN]:
            # what is not called, or only called wrongly, is explained by the module around it
            tried = [suspect.component, *sorted(suspect.consequences, key=len, reverse=True)]
            for component in tried:
                found = prove_causes(context.experiment, [component], instances, thresholds)
                suspect.cause = next(iter(found), suspect.cause)
                if suspect.cause is not None and suspect.cause.proven:
                    break


def in_words(cause: CauseReport) -> str:
    """The proof in one line, or what came nearest."""
    if cause.proven and cause.winner is not None:
        other = f"; {cause.elsewhere}" if cause.elsewhere else ""
        return (
            f"proven: {cause.winner.says} ({cause.winner.kind}); with it the source gives the port's output, "
            f"R32 {cause.before:.3g} -> {cause.winner.r32:.2g}{other}. Remedy: {cause.winner.repair}"
        )
    if cause.note:
        return f"no cause proven: {cause.note}"
    near = f"; nearest: {cause.runner_ups[0].says}, R32 {cause.runner_ups[0].r32:.3g}" if cause.runner_ups else ""
    return f"no cause proven, R32 {cause.before:.3g}, {cause.tried} hypotheses{near}"


def _faults(instances: Sequence[InstanceRow], failing: Sequence[str], thresholds: Thresholds) -> list[_Fault]:
    """For each failing component its first bad place, preferring steps, then the largest excess over fixtures."""
    series: dict[tuple[str, str, str], list[InstanceRow]] = defaultdict(list)
    for row in instances:
        if row.component in failing:
            series[(row.component, row.fixture, row.phase)].append(row)
    best: dict[str, _Fault] = {}
    for (component, _, _), rows in series.items():
        rows.sort(key=lambda row: row.layer if row.layer is not None else -1)
        points = change_points([row.excess for row in rows])
        if not points:
            # only together, as a mean over layers and seeds: the worst draw stands for it
            worst = max(rows, key=lambda row: row.r_ratio or 0.0)
            if (worst.r_ratio or 0.0) < thresholds.component_limit(worst.component_type):
                continue
            fault = _Fault(component, worst, Pattern.STEP)
        else:
            fault = _Fault(component, rows[points[0].start], points[0].pattern)
        kept = best.get(component)
        if kept is None or _weight(fault) > _weight(kept):
            best[component] = fault
    return list(best.values())


def _weight(fault: _Fault) -> tuple[bool, float]:
    return (fault.pattern is Pattern.STEP, fault.row.excess)


def _suspects(
    context: StageContext, faults: Sequence[_Fault], thresholds: Thresholds, undecided: Set[str]
) -> list[Suspect]:
    """Innermost components first, what is only undecided last; what contains a suspect is its consequence."""
    entries = {}
    if context.experiment is not None:
        entries = {entry.name: entry for entry in mapping_of(context.experiment).tested}
    inner = [f for f in faults if not any(other.component.startswith(f.component + ".") for other in faults)]
    inner.sort(
        key=lambda fault: (
            fault.component in undecided,
            fault.pattern is not Pattern.STEP,
            fault.row.layer if fault.row.layer is not None else -1,
            component_rank(fault.row.component_type),
        )
    )
    suspects = []
    for rank, fault in enumerate(inner, start=1):
        cause, description = root_cause(fault.row, thresholds)
        entry = entries.get(fault.component)
        suspects.append(
            Suspect(
                rank=rank,
                component=fault.component,
                layer=fault.row.layer,
                fixture=fault.row.fixture,
                phase=fault.row.phase,
                pattern=fault.pattern,
                r_ratio=fault.row.r_ratio,
                r32=fault.row.r32,
                root_cause=cause,
                description=description,
                source_modules=list(entry.source) if entry else [],
                target_modules=list(entry.target) if entry else [],
                consequences=[f.component for f in faults if fault.component.startswith(f.component + ".")],
            )
        )
    return suspects


def root_cause(row: InstanceRow, thresholds: Thresholds) -> tuple[str, str]:
    """Class and description by magnitude (seed 003); faults below bf16's noise are told by their R32."""
    r_ratio = row.r_ratio
    if row.excess == float("inf") or r_ratio is None:
        return "not comparable or not a copy", "shapes differ, or a lookup or copy gives other values"
    decode = " (seen in decode: check positions and cache)" if row.phase == "decode" else ""
    if r_ratio >= 10:
        return "missing algorithm or wrong formula", f"R = {r_ratio:.3g}, far beyond rounding{decode}"
    if r_ratio >= 3:
        return "missing multiplier or wrong order", f"R = {r_ratio:.3g}: a factor, bias or operation is missing{decode}"
    if r_ratio >= thresholds.component_limit(row.component_type):
        if row.r32 is not None and row.r32 <= thresholds.r32_pooled:
            return (
                "precision order",
                f"R = {r_ratio:.3g} with fp32 exact: something is rounded or summed too early{decode}",
            )
        return "precision order or missing multiplier", f"R = {r_ratio:.3g}{decode}"
    fp32 = f"R32 = {row.r32:.3g}" if row.r32 is not None else "no fp32 evidence"
    if row.r32 is not None and row.r32 > thresholds.r32_pooled:
        return (
            "small difference of formula or constant",
            f"{fp32} under bf16's noise: eps, base, activation, a weight{decode}",
        )
    return "local difference", f"{fp32} pooled, worst on a slice: one head, position or channel{decode}"
