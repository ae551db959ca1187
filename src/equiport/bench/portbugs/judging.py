"""Every gate of stages 0, 1, 2 and 5 on one port, in one process, and the proof of the cause."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from equiport.compare.gates import GateResult, judge
from equiport.compare.gates_consistency import alive_gate
from equiport.compare.reasons import ReasonCode
from equiport.compare.records import Record, make_record
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.experiment import Experiment, ReasonRecord
from equiport.stacks.contract import StackAdapter
from equiport.stages import stage0
from equiport.stages.alive import nudge_all
from equiport.stages.causes import CauseReport, innermost, prove_causes
from equiport.stages.component_check import compare_sample
from equiport.stages.component_evidence import FileEvidence
from equiport.stages.component_fixtures import (
    TracePlan,
    component_samples,
    drawn_variants,
    mapping_of,
    trace_folder,
    write_trace,
)
from equiport.stages.component_rows import component_rows, not_called_reasons, row_reasons
from equiport.stages.frame import StageOptions, Subject
from equiport.stages.instances import instance_rows
from equiport.stages.invariance import check_invariance
from equiport.stages.progress import Progress

_SINGLE = 100.0


class Judged(BaseModel):
    """What equiport says of a port.

    `stage`, `component`: the first that fails, -1 and "" where nothing does. `cause`: the kind that was proven.
    `gates`: every gate that failed, by name.
    """

    model_config = ConfigDict(frozen=True)

    stage: int
    component: str
    cause: str
    says: str
    gates: list[str]
    reasons: list[str]
    r32: float
    seconds: float

    @property
    def detected(self) -> bool:
        """Whether any gate failed."""
        return bool(self.gates)


def judge_port(
    subject: Subject,
    adapter: StackAdapter,
    folder: Path,
    seeds: Sequence[int],
    *,
    with_stage_0: bool = True,
    split: Sequence[str] = (),
) -> Judged:
    """Judge a port of the model in `subject.model_path`; the experiment is made in `folder`.

    `split`: projections whose reduction the port sums in two parts, declared in the mapping as a user would.

    The alive gate and the invariance checks run where the components find nothing: they decide nothing else there.
    """
    started = time.monotonic()
    thresholds, options = Thresholds(), StageOptions(quiet=True, seed=seeds[0])
    structure = stage0.run(options, subject, adapter, folder / "model_tree")
    experiment = Experiment.open(folder)
    _declare(experiment, split)
    components, records = _components(experiment, subject, adapter, seeds, thresholds)
    # what failed before what is only undecided
    components.sort(key=lambda reason: reason.code == ReasonCode.SEEDS_STRADDLE.value)
    failing = list(dict.fromkeys(reason.subject.split(" (")[0] for reason in components))
    alive = shapes = GateResult("not needed", Verdict.PASS)
    if not components:
        weights = folder / "fixtures" / f"perturbed-{seeds[0]}"
        alive = alive_gate(nudge_all(adapter, subject.classes, weights, seeds[0]), thresholds)
        with drawn_variants(experiment, subject.model_path, seeds[0]) as variants:
            _, shapes = check_invariance(adapter, subject.classes, weights, seeds[0], thresholds, variants)
    causes = prove_causes(experiment, innermost(failing)[:4], instance_rows(records, thresholds), thresholds)
    proven = next((report for report in causes if report.proven), None)
    failed = {
        "stage 0": structure.verdict is not Verdict.PASS and with_stage_0,
        "alive": alive.verdict is not Verdict.PASS,
        "components": bool(components),
        "invariance": shapes.verdict is not Verdict.PASS,
    }
    if with_stage_0 and structure.verdict is not Verdict.PASS:
        stage, component = 0, structure.reasons[0].subject
    elif components:
        stage, component = 2, innermost(failing)[0]
    elif alive.verdict is not Verdict.PASS:
        stage, component = 1, alive.reasons[0].subject
    elif shapes.verdict is not Verdict.PASS:
        stage, component = 5, shapes.reasons[0].subject
    else:
        stage, component = -1, ""
    said: list[Reason | ReasonRecord] = [*structure.reasons, *components, *alive.reasons, *shapes.reasons]
    return Judged(
        stage=stage,
        component=component,
        cause=proven.winner.kind if proven and proven.winner else "" if components else _dead(alive).kind,
        says=_says(proven, causes) or ("" if components else _dead(alive).says),
        gates=[name for name, bad in failed.items() if bad],
        reasons=[f"{item.code} {item.subject}: {item.message}" for item in said][:12],
        r32=max((r.comparison.r32 or 0.0 for r in records if r.comparison), default=0.0),
        seconds=time.monotonic() - started,
    )


def _declare(experiment: Experiment, split: Sequence[str]) -> None:
    if not split:
        return
    mapping = json.loads(experiment.mapping_file.read_text(encoding="utf-8"))
    for _, target, notes in mapping:
        if target and target[0].endswith(tuple(split)):
            notes["reduction_split"] = 2
    experiment.mapping_file.write_text(json.dumps(mapping), encoding="utf-8")


def _components(
    experiment: Experiment, subject: Subject, adapter: StackAdapter, seeds: Sequence[int], thresholds: Thresholds
) -> tuple[list[Reason], list[Record]]:
    """Stage 2 without pytest around it."""
    quiet = Progress(quiet=True)
    manifest = write_trace(experiment, subject, adapter, subject.model_path, TracePlan(tuple(seeds)), quiet)
    found = [
        compare_sample(sample)
        for entry in mapping_of(experiment).tested
        if entry.name not in manifest.untestable
        for sample in component_samples(trace_folder(experiment), entry.name)
    ]
    records = [make_record(item.name, comparison=item, result=judge(item, thresholds, _SINGLE)) for item in found]
    rows = component_rows([FileEvidence("corpus", tuple(records), 1, (), "")], thresholds)
    return [*not_called_reasons(rows, manifest.not_called), *row_reasons(rows)], records


class _Dead(BaseModel):
    """What the alive gate proves by itself: the source moves with a key or a tensor, the port does not."""

    kind: str = ""
    says: str = ""


def _dead(alive: GateResult) -> _Dead:
    kinds = {ReasonCode.UNREAD_KEY.value: "config key not read", ReasonCode.DEAD_TENSOR.value: "tensor not used"}
    first = next((reason for reason in alive.reasons if reason.code in kinds), None)
    return _Dead(kind=kinds[first.code], says=f"{first.subject}: {first.message}") if first else _Dead()


def _says(proven: CauseReport | None, causes: Sequence[CauseReport]) -> str:
    if proven is not None and proven.winner is not None:
        return proven.winner.says
    near = [report.runner_ups[0] for report in causes if report.runner_ups]
    return f"nearest: {near[0].says} at R32 {near[0].r32:.2g}" if near else ""
