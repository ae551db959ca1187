"""What the pipeline computes for a port, in one process: structure, components of drawn weights, causes, fp32 logits.

`python -m equiport.bench.port_check OUT PORT MODEL EXP INNER CAUSAL CONFIG` writes one `PortCheck` to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from pydantic import BaseModel

from equiport.bench.family_check import logits_error
from equiport.compare.gates import judge
from equiport.compare.reasons import UNDECIDED, ReasonCode, reason
from equiport.compare.records import Record, make_record
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import write_json
from equiport.fixtures.weights import WeightKind
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import PortClasses
from equiport.stages import stage0
from equiport.stages.boundaries import settle_boundaries
from equiport.stages.causes import CauseReport, innermost, prove_causes
from equiport.stages.component_check import compare_sample, labels_of
from equiport.stages.component_evidence import FileEvidence
from equiport.stages.component_fixtures import TracePlan, component_samples, mapping_of, trace_folder, write_trace
from equiport.stages.component_rows import component_rows, not_called_reasons, row_reasons
from equiport.stages.device_classes import device_classes, settle_device_classes
from equiport.stages.frame import StageOptions, Subject
from equiport.stages.instances import instance_rows
from equiport.stages.progress import Progress
from equiport.trace.sample import ComponentSample

_SEEDS = (42, 43, 44)
_LIMIT = 1e-5
_SUSPECTS = 6


class PortCheck(BaseModel):
    """`structure` and `components`: what is not PASS, in words, the first first; `apart`: components that do work on
    the other side of a border. `decode`, `prefill`: relative L2 of fp32 logits to the source's; None where they do not
    run.
    """

    tier: str
    structure: list[str] = []
    open_points: list[str] = []
    components: list[str] = []
    failing: list[str] = []
    apart: list[str] = []
    untestable: list[str] = []
    causes: list[CauseReport] = []
    r32: float | None = None
    decode: float | None = None
    prefill: float | None = None
    said: str = ""

    @property
    def verdict(self) -> Verdict:
        """FAIL, or INCONCLUSIVE where modules are left without an entry in the mapping, or seeds straddle a limit."""
        off = [error for error in (self.decode, self.prefill) if error is None or not error < _LIMIT]
        if self.structure or self.components or off:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.open_points else Verdict.PASS


def check_port(subject: Subject, exp: Path, adapter: StackAdapter) -> PortCheck:
    """Stage 0, the comparisons of stage 2 on the model's own weights with three seeds, causes of what fails, logits.

    Raises:
        EquiportError: the port does not load.
    """
    thresholds, model = Thresholds(), subject.model_path
    structure = stage0.run(StageOptions(quiet=True), subject, adapter, exp / "model_tree")
    said = [f"{reason.code} {reason.subject}: {reason.message}" for reason in structure.reasons]
    wrong = structure.verdict is Verdict.FAIL
    experiment = Experiment.open(exp)
    plan = TracePlan(_SEEDS, (WeightKind.REAL,))
    manifest = write_trace(experiment, subject, adapter, model, plan, Progress(quiet=True))
    mapping = mapping_of(experiment)
    records = [
        _record(sample, thresholds)
        for entry in mapping.tested
        if entry.name not in manifest.untestable
        for sample in component_samples(trace_folder(experiment), entry.name)
    ]
    instances = instance_rows(records, thresholds)
    rows = component_rows([FileEvidence("", tuple(records), 1, (), "")], thresholds)
    rows = settle_boundaries(rows, instances, mapping)
    rows = settle_device_classes(rows, instances, device_classes(experiment, mapping), thresholds)
    reasons = [*not_called_reasons(rows, manifest.not_called), *row_reasons(rows, thresholds)]
    unsure = [reason for reason in reasons if reason.code in UNDECIDED]
    reasons = [reason for reason in reasons if reason.code not in UNDECIDED]
    failing = innermost(list(dict.fromkeys(reason.subject.split(" (")[0] for reason in reasons)))
    check = PortCheck(
        tier=adapter.check_environment().tier.value,
        structure=said if wrong else [],
        open_points=[*([] if wrong else said), *(f"{r.code} {r.subject}: {r.message}" for r in unsure)],
        components=[f"{reason.code} {reason.subject}: {reason.message}" for reason in reasons],
        failing=failing,
        apart=sorted({f"{row.component} (in {row.boundary})" for row in rows if row.boundary}),
        untestable=[f"{name}: {text}" for name, text in manifest.untestable.items()],
        r32=max((row.r32_worst for row in rows if row.r32_worst is not None and not row.boundary), default=None),
        causes=prove_causes(experiment, failing[:_SUSPECTS], instances, thresholds) if failing else [],
    )
    try:
        decode, prefill = logits_error(subject, model, adapter)
    except EquiportError as error:
        return check.model_copy(update={"said": error.line()})
    return check.model_copy(update={"decode": decode, "prefill": prefill})


def _record(sample: ComponentSample, thresholds: Thresholds) -> Record:
    """The judged comparison; of tensors that cannot be compared a failing record, as a test file leaves it."""
    try:
        found = compare_sample(sample)
    except EquiportError as error:
        said = reason(ReasonCode.SHAPE_MISMATCH, error.what, sample.name)
        return make_record(sample.name, reasons=(said,), labels=labels_of(sample))
    return make_record(found.name, comparison=found, result=judge(found, thresholds, thresholds.r_slice))


def main() -> None:
    """Check one port; what does not load is told in `said`."""
    out, port, model, exp, inner, causal, config = sys.argv[1:]
    torch.set_num_threads(1)
    adapter = load_adapter("nxdi")
    subject = Subject(Path(model), PortClasses(Path(port), inner=inner, causal=causal, config=config), "nxdi")
    try:
        check = check_port(subject, Path(exp), adapter)
    except EquiportError as error:
        check = PortCheck(tier=adapter.check_environment().tier.value, said=error.line())
    write_json(Path(out), check)


if __name__ == "__main__":
    main()
