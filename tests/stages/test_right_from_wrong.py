"""The pipeline's verdict on the example port broken in many ways, and on correct rewrites of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from broken_ports import BROKEN, CORRECT, EXAMPLE, LOW_NORM_ON_CPU, LOW_NORM_ON_CPU_WRONG_EPS, PortEdit

from equiport.compare.gates import judge
from equiport.compare.reasons import UNDECIDED, reason
from equiport.compare.records import Record, make_record
from equiport.compare.streams import ComparisonError
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.experiment import Experiment, StageResult
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages import stage0
from equiport.stages.boundaries import settle_boundaries
from equiport.stages.causes import innermost, prove_causes
from equiport.stages.component_check import compare_sample, labels_of
from equiport.stages.component_evidence import FileEvidence
from equiport.stages.component_fixtures import TracePlan, component_samples, mapping_of, trace_folder, write_trace
from equiport.stages.component_rows import component_rows, evidence_reasons, not_called_reasons, row_reasons
from equiport.stages.device_classes import device_classes, settle_device_classes
from equiport.stages.frame import StageOptions, Subject
from equiport.stages.instances import InstanceRow, instance_rows
from equiport.stages.progress import Progress
from equiport.stages.teacher_forced import TeacherForcedOptions, run_stage5, run_stage6
from equiport.trace.sample import ComponentSample

SQUARE_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 160,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 251,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEEDS = (42, 43, 44)


@pytest.fixture(scope="module")
def square_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama whose o_proj is square: a transpose there changes no shape."""
    root = tmp_path_factory.mktemp("square")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps(SQUARE_LLAMA))
    torch.set_num_threads(1)
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 5, tiny=False).folder


@dataclass(frozen=True)
class Judged:
    """What stage 0 and the component comparisons say of a port."""

    structure: StageResult
    components: list[Reason]
    experiment: Experiment
    subject: Subject
    instances: list[InstanceRow]

    @property
    def first(self) -> tuple[int, str]:
        """(stage, component) that the report would name; (-1, "") when nothing fails."""
        if self.structure.verdict is not Verdict.PASS:
            return 0, self.structure.reasons[0].subject
        return (2, self.components[0].subject) if self.components else (-1, "")


def judged(
    edit: PortEdit,
    model: Path,
    folder: Path,
    seeds: Sequence[int],
    kinds: tuple[WeightKind, ...] = (WeightKind.REAL, WeightKind.PERTURBED),
) -> Judged:
    """Stage 0, then the comparisons of stage 2 without pytest around them."""
    folder.mkdir(parents=True)
    file = folder / "modeling_llama_nxdi.py"
    file.write_text(edit.edit(EXAMPLE.read_text()))
    adapter, options = load_adapter("nxdi"), StageOptions(quiet=True)
    subject = Subject(model, find_port_classes(file), "nxdi")
    structure = stage0.run(options, subject, adapter, folder / "exp" / "model_tree")
    experiment = Experiment.open(folder / "exp")
    if edit.split:
        _declare_split(experiment, edit.split)
    reasons, instances = compared(experiment, subject, TracePlan(tuple(seeds), kinds), model)
    return Judged(structure, reasons, experiment, subject, instances)


def compared(
    experiment: Experiment, subject: Subject, plan: TracePlan, model: Path
) -> tuple[list[Reason], list[InstanceRow]]:
    """The component comparisons of an experiment, in this process: what fails, and the figures layer by layer."""
    manifest = write_trace(experiment, subject, load_adapter("nxdi"), model, plan, Progress(quiet=True))
    thresholds = Thresholds()
    records: list[Record] = []
    for entry in mapping_of(experiment).tested:
        if entry.name not in manifest.untestable:
            records += _records(component_samples(trace_folder(experiment), entry.name), thresholds)
    instances = instance_rows(records, thresholds)
    refused = [
        Reason("COMPARISON_REFUSED", item.reasons[0].message, item.name) for item in records if not item.comparison
    ]
    evidence = [FileEvidence("test.py", tuple(records), 1, tuple(refused), "")]
    rows = component_rows(evidence, thresholds)
    rows = settle_boundaries(rows, instances, mapping_of(experiment))
    rows = settle_device_classes(rows, instances, device_classes(experiment, mapping_of(experiment)), thresholds)
    reasons = [*not_called_reasons(rows, manifest.not_called), *row_reasons(rows), *evidence_reasons(evidence, rows)]
    return reasons, instances


def _records(samples: Sequence[ComponentSample], thresholds: Thresholds) -> list[Record]:
    """As a generated test leaves them: it ends with the first comparison that is refused."""
    records = []
    for sample in samples:
        try:
            found = compare_sample(sample)
        except ComparisonError as error:
            said = reason(error.code, error.what, sample.name)
            return [make_record(sample.name, reasons=(said,), labels=labels_of(sample))]
        records.append(make_record(found.name, comparison=found, result=judge(found, thresholds, 100.0)))
    return records


def _declare_split(experiment: Experiment, degree: int) -> None:
    mapping = json.loads(experiment.mapping_file.read_text())
    for _, target, notes in mapping:
        if target and target[0].endswith(".down_proj"):
            notes["reduction_split"] = degree
    experiment.mapping_file.write_text(json.dumps(mapping))


@pytest.mark.parametrize("edit", BROKEN, ids=lambda edit: edit.name)
def test_a_broken_port_fails_where_the_fault_is(edit: PortEdit, square_model: Path, tmp_path: Path) -> None:
    result = judged(edit, square_model, tmp_path / "port", SEEDS)
    stage, component = result.first
    assert stage == edit.stage, (result.structure.reasons, result.components)
    assert edit.component and edit.component in component, (result.structure.reasons, result.components)
    if edit.cause is not None:
        failing = list(dict.fromkeys(reason.subject.split(" (")[0] for reason in result.components))
        found = prove_causes(result.experiment, innermost(failing), result.instances, Thresholds())
        proven = [sorted(report.winner.kind.split(" + ")) for report in found if report.winner]
        assert proven[:1] == [edit.cause.split(" + ")], found


@pytest.mark.parametrize("edit", CORRECT, ids=lambda edit: edit.name)
def test_a_correct_port_passes_on_five_seeds(edit: PortEdit, square_model: Path, tmp_path: Path) -> None:
    result = judged(edit, square_model, tmp_path / "port", (1, 2, 3, 4, 5))
    assert result.first == (-1, ""), (result.structure.reasons, result.components)
    options = StageOptions(exp_dir=result.experiment.root, quiet=True, force=True)
    adapter = load_adapter("nxdi")
    end_to_end = run_stage5(options, TeacherForcedOptions(), result.subject, adapter)
    assert end_to_end.verdict is Verdict.PASS, end_to_end.reasons
    file = result.experiment.results / "teacher_forced.json"
    distribution = run_stage6(options, TeacherForcedOptions(), file, result.subject, adapter)
    assert distribution.verdict is Verdict.PASS, distribution.reasons


def test_a_correct_port_of_a_model_with_biases_passes(tmp_path: Path) -> None:
    """Sharded layers add the bias after the product is rounded, HF in one rounding: no fault of the port."""
    config = {**SQUARE_LLAMA, "attention_bias": True, "mlp_bias": True}
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    model = materialize(tmp_path / "source", tmp_path / "model", WeightKind.PERTURBED, 5, tiny=False).folder
    result = judged(CORRECT[0], model, tmp_path / "port", SEEDS)
    assert result.first == (-1, ""), (result.structure.reasons, result.components)


def test_a_coarse_class_of_cpu_mode_alone_is_undecided(square_model: Path, tmp_path: Path) -> None:
    """The device builds another class, so that its rounding is neither a fault of the port nor a proof of it."""
    result = judged(LOW_NORM_ON_CPU, square_model, tmp_path / "port", SEEDS)
    codes = {reason.code for reason in result.components}
    assert "CPU_CLASS" in codes and codes <= UNDECIDED, result.components
    norms = [reason for reason in result.components if reason.code == "CPU_CLASS" and "norm" in reason.subject]
    assert norms and all("test CustomRMSNorm on the device" in reason.message for reason in norms), norms


def test_a_class_of_cpu_mode_that_is_wrong_in_fp32_still_fails(square_model: Path, tmp_path: Path) -> None:
    result = judged(LOW_NORM_ON_CPU_WRONG_EPS, square_model, tmp_path / "port", SEEDS)
    failing = [reason for reason in result.components if reason.code == "COMPONENT_FAILS"]
    assert failing and "norm" in failing[0].subject, result.components


@pytest.mark.parametrize(
    "name", ["rotation interleaved", "rope theta x1.001", "decode position off by one", "eps", "one weight off"]
)
def test_end_to_end_alone_sees_the_fault(name: str, square_model: Path, tmp_path: Path) -> None:
    """Were stage 2 skipped by force, stage 5 would still fail, and on the path that holds the fault."""
    edit = next(edit for edit in BROKEN if edit.name == name)
    (tmp_path / "port").mkdir()
    file = tmp_path / "port" / "modeling_llama_nxdi.py"
    file.write_text(edit.edit(EXAMPLE.read_text()))
    subject, adapter = Subject(square_model, find_port_classes(file), "nxdi"), load_adapter("nxdi")
    options = StageOptions(quiet=True)
    stage0.run(options, subject, adapter, tmp_path / "exp" / "model_tree")
    forced = StageOptions(exp_dir=tmp_path / "exp", quiet=True, force=True)
    result = run_stage5(forced, TeacherForcedOptions(num_tokens=8), subject, adapter)
    assert result.verdict is Verdict.FAIL and result.forced
    subjects = [reason.subject for reason in result.reasons if reason.code != "INCONSISTENT"]
    paths = {subject.split(",")[0] for subject in subjects if not subject.startswith("bf16")}
    inconsistent = any(reason.code == "INCONSISTENT" for reason in result.reasons)
    assert inconsistent == ("decode" in name), result.reasons
    assert paths == ({"decode path"} if "decode" in name else {"decode path", "prefill path"}), result.reasons
