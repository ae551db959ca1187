"""Stage 4: standalone patches are applied to the port's classes, and the component tests run again, before and after.

With --draft, patches for the causes that stage 3 proved are written first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ValidationError

from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError
from equiport.experiment import StageResult, load_result
from equiport.experiment.hashing import port_files, sha256
from equiport.stacks.contract import StackAdapter
from equiport.stacks.patches import patch_files
from equiport.stages.component_rows import ComponentRow
from equiport.stages.draft_patches import Drafted, draft_patches
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, find_experiment, run_stage
from equiport.stages.patched_mapping import with_patched_mapping
from equiport.stages.stage2 import ComponentMetrics, Stage2Options, run_component_tests

SPEC = StageSpec(4, "patches", needs={2: False, 3: False})


@dataclass(frozen=True)
class Stage4Options:
    """Flags of run_stage4.py."""

    patches_dir: Path
    stage2_output: Path
    tests_dir: Path
    draft: bool = False
    stage3_output: Path | None = None


class PatchedRow(BaseModel):
    """One component and fixture that failed before: its figures before and after."""

    component: str
    fixture: str
    before: Verdict
    after: Verdict
    r_before: float | None
    r_after: float | None
    r32_before: float | None
    r32_after: float | None


class PatchMetrics(BaseModel):
    """What the patches did: rows bottom-up, and components that broke by them.

    `drafted`: files that --draft wrote; `undrafted`: proven causes without a draft, and why.
    """

    patches: list[str]
    rows: list[PatchedRow]
    broken: list[str]
    still_failing: list[str]
    comparisons: int
    drafted: list[str] = []
    undrafted: list[str] = []


def run(options: StageOptions, stage: Stage4Options, subject: Subject, adapter: StackAdapter) -> StageResult:
    """Apply the patches and run the component tests again.

    Raises:
        EquiportError: no patches, a patch that is not idempotent or changes nothing; with --draft, no cause for which a
            patch can be drafted.
    """
    drafted = _draft(options, stage, subject) if stage.draft else Drafted((), (), ())
    if not stage.patches_dir.is_dir() or not patch_files(stage.patches_dir):
        raise EquiportError(
            "holds no patch",
            where=stage.patches_dir,
            field="--patches-dir",
            remedy="Write one *.py file a fix there, or add --draft.",
        )
    before = _component_metrics(stage.stage2_output)
    return run_stage(
        SPEC,
        replace(options, patches_dir=stage.patches_dir),
        lambda context: _body(context, stage, before, drafted),
        subject=subject,
        adapter=adapter,
    )


def _draft(options: StageOptions, stage: Stage4Options, subject: Subject) -> Drafted:
    """Write the drafts, if stage 3 has run on what is there now."""
    experiment = find_experiment(options)
    if experiment is not None:
        experiment.require(4, dict(SPEC.needs), force=options.force)
    if stage.stage3_output is None:
        raise EquiportError("needs a result of stage 3", field="--draft", remedy="Run it in an experiment.")
    return draft_patches(stage.stage3_output, subject.classes, subject.stack, stage.patches_dir)


def _component_metrics(file: Path) -> ComponentMetrics:
    result = load_result(file)
    try:
        if result.stage != 2:
            raise EquiportError(f"is a result of stage {result.stage}", where=file, remedy="Give stage2.json.")
        return ComponentMetrics.model_validate(result.metrics)
    except ValidationError as error:
        raise EquiportError(
            f"holds no component metrics: {error.errors()[0]['msg']}", where=file, remedy="Run stage 2 again."
        ) from None


def _body(context: StageContext, stage: Stage4Options, before: ComponentMetrics, drafted: Drafted) -> Outcome:
    for path in drafted.written:
        context.progress.line(f"drafted {path.name}")
    for path in drafted.kept:
        context.progress.line(f"{path.name} is there already and stays; delete it to have it drafted anew")
    for line in drafted.without:
        context.progress.line(line)
    files = {path: sha256(path) for path in port_files(context.port.modeling_file)}
    inputs = [stage.stage2_output]
    if context.experiment is not None:
        inputs.append(context.experiment.mapping_file)
        experiment, moved = with_patched_mapping(
            context.experiment, context.port, context.stack, context.weights_folder()
        )
        for name in moved:
            context.progress.line(f"{name}: its weights come from another module under the patches; compared with that")
        context = replace(context, experiment=experiment)
    after = run_component_tests(context, Stage2Options(stage.tests_dir, timeout=300.0))
    metrics = after.metrics
    assert isinstance(metrics, ComponentMetrics)
    reasons = list(after.reasons)
    touched = [path.name for path, digest in files.items() if sha256(path) != digest]
    reasons += [Reason("PORT_CHANGED", "the port's file was changed while patches ran", name) for name in touched]
    rows, broken = _rows(before, metrics)
    for row in rows:
        context.progress.line(
            f"{row.component} ({row.fixture}): R {_figure(row.r_before)} -> {_figure(row.r_after)}, "
            f"R32 {_figure(row.r32_before)} -> {_figure(row.r32_after)}: {row.after.value}"
        )
    reasons += [Reason("PATCH_BREAKS", "passed before the patches and does not now", name) for name in broken]
    left = list(dict.fromkeys(row.component for row in rows if row.after is not Verdict.PASS))
    if left:
        text = f"the draft does not suffice; left: {', '.join(left)}"
        reasons += [Reason("DRAFT_INCOMPLETE", text, path.name) for path in (*drafted.written, *drafted.kept)]
    found = PatchMetrics(
        patches=[path.name for path in patch_files(stage.patches_dir)],
        rows=rows,
        broken=broken,
        still_failing=[row.component for row in rows if row.after is not Verdict.PASS],
        comparisons=metrics.comparisons,
        drafted=[path.name for path in drafted.written],
        undrafted=list(drafted.without),
    )
    verdict = Verdict.FAIL if touched else after.verdict
    inputs = [*after.inputs, *inputs]
    return Outcome(verdict, reasons, found, after.blind_spots, after.seeds, inputs)


def _rows(before: ComponentMetrics, after: ComponentMetrics) -> tuple[list[PatchedRow], list[str]]:
    def keyed(metrics: ComponentMetrics) -> dict[tuple[str, str], ComponentRow]:
        return {(row.component, row.fixture): row for row in (*metrics.rows, *metrics.unlabelled)}

    old, new = keyed(before), keyed(after)
    rows = [
        PatchedRow(
            component=component,
            fixture=fixture,
            before=row.verdict,
            after=new[(component, fixture)].verdict if (component, fixture) in new else Verdict.NOT_RUN,
            r_before=row.r_geomean,
            r_after=new[(component, fixture)].r_geomean if (component, fixture) in new else None,
            r32_before=row.r32_worst,
            r32_after=new[(component, fixture)].r32_worst if (component, fixture) in new else None,
        )
        for (component, fixture), row in old.items()
        if row.verdict is not Verdict.PASS
    ]
    broken = [
        component
        for (component, fixture), row in new.items()
        if row.verdict is Verdict.FAIL
        and (component, fixture) in old
        and old[(component, fixture)].verdict is Verdict.PASS
    ]
    return rows, list(dict.fromkeys(broken))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
