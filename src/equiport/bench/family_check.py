"""The pipeline's judgement of a port of a family's tiny model, in one process: stage 0, components, logits.

`python -m equiport.bench.family_check OUT WORK STACK NAME...` judges families, a line of JSON each.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equiport.bench.family_models import folder_of, write_model
from equiport.compare.comparison import Comparison
from equiport.compare.gates_components import component_gate
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.fixtures.folder import read_config
from equiport.fixtures.tokens import TokenBatch, draw_batch, special_ids
from equiport.fixtures.weights import WeightKind
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan_substitution import placed_blocks
from equiport.port.scaffold import Composer, write_modeling
from equiport.reference.logits import sequence_logits
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits
from equiport.stages import stage0
from equiport.stages.component_check import compare_sample
from equiport.stages.component_fixtures import TracePlan, component_samples, mapping_of, trace_folder, write_trace
from equiport.stages.frame import StageOptions, Subject
from equiport.stages.progress import Progress

_PROMPTS, _STEPS = (21, 13, 11), 6


@dataclass(frozen=True)
class Judgement:
    """What the pipeline says of a port. `decode`, `prefill`: ‖port − reference‖ / ‖reference‖ of fp32 logits.

    `r32`, `r`: the largest of any component (of `r` the geometric mean of its draws); `logits` [3, 6, vocabulary].
    """

    structure: Verdict
    structure_reasons: tuple[str, ...]
    components: dict[str, Verdict]
    component_reasons: tuple[str, ...]
    untestable: dict[str, str]
    decode: float
    prefill: float
    r32: float
    r: float
    logits: Tensor

    @property
    def failures(self) -> list[str]:
        """Everything that is not PASS, in words; empty for a correct port."""
        found = [] if self.structure is Verdict.PASS else [f"stage 0: {self.structure_reasons}"]
        found += [
            f"{name}: {verdict.value}" for name, verdict in self.components.items() if verdict is not Verdict.PASS
        ]
        if found:
            found += self.component_reasons
        found += [f"decode logits off by {self.decode:.1e}"] if not self.decode < 1e-5 else []
        return found + ([f"prefill logits off by {self.prefill:.1e}"] if not self.prefill < 1e-5 else [])


def judge(port: Path, model: Path, exp: Path, adapter: StackAdapter) -> Judgement:
    """Stage 0, the component comparisons of stage 2 without pytest around them, and fp32 logits by teacher forcing."""
    subject = Subject(model, find_port_classes(port), "nxdi")
    structure = stage0.run(StageOptions(quiet=True), subject, adapter, exp / "model_tree")
    experiment = Experiment.open(exp)
    plan = TracePlan((42,), (WeightKind.REAL,))
    manifest = write_trace(experiment, subject, adapter, model, plan, Progress(quiet=True))
    # one seed: the limits of single draws
    thresholds = Thresholds(tau_r_by_type={}, r_single=1.3, r_geomean=1.3, r_component=1.5)
    verdicts: dict[str, Verdict] = {}
    reasons: list[str] = []
    r32, means = [0.0], [0.0]
    for entry in mapping_of(experiment).components:
        if entry.name in manifest.untestable:
            continue
        samples = component_samples(trace_folder(experiment), entry.name)
        found = [compare_sample(sample) for sample in samples]
        result = component_gate(found, thresholds)
        verdicts[entry.name] = result.verdict
        r32 += [one.r32 for one in found if one.r32 is not None]
        means.append(_mean(found))
        reasons += [f"{reason.code} {reason.subject}: {reason.message}" for reason in result.reasons[:1]]
    logits = port_logits(subject, model, adapter)
    return Judgement(
        structure.verdict, tuple(f"{r.code} {r.subject}: {r.message}" for r in structure.reasons), verdicts,
        tuple(reasons), manifest.untestable, *_errors(logits, expected_logits(model)), max(r32), max(means),
        logits.decode,
    )  # fmt: skip


def _mean(found: list[Comparison]) -> float:
    ratios = torch.tensor([one.r_ratio for one in found if one.r_ratio > 0], dtype=torch.float64)
    return float(ratios.log().mean().exp()) if len(ratios) else 0.0


def _batch(model: Path) -> TokenBatch:
    config = read_config(model)
    return draw_batch(int(config["vocab_size"]), _PROMPTS, _STEPS, 11, special_ids(config))


@functools.cache
def expected_logits(model: Path) -> Tensor:
    """The source's fp32 logits [3, 6, vocabulary], from one forward over each whole row."""
    reference, batch = load_reference(model, torch.float32), _batch(model)
    rows = zip(batch.rows, batch.prompt_lengths, strict=True)
    return torch.stack([sequence_logits(reference, row, length - 1)[:_STEPS] for row, length in rows])


@dataclass(frozen=True)
class PortLogits:
    """fp32 logits on ragged rows: decoded step by step [3, 6, vocabulary]; of prefill alone, the fourth of them."""

    decode: Tensor
    prefill: Tensor


def port_logits(subject: Subject, model: Path, adapter: StackAdapter) -> PortLogits:
    """Teacher-forced logits of a port.

    Raises:
        EquiportError: it does not load, or its weights do not load whole.
    """
    batch = _batch(model)
    port = adapter.create_model(
        subject.modeling_file, subject.classes.causal, subject.classes.config, model, dtype=torch.float32,
        batch_size=len(_PROMPTS), seq_len=batch.max_length + 3,
    )  # fmt: skip
    if not adapter.load_weights(port, model, torch.float32).clean:
        raise EquiportError("its weights do not load whole", where=subject.modeling_file)
    got = decode_logits(adapter, port, batch.rows, batch.prompt_lengths, _STEPS)
    ends = [length + 3 for length in batch.prompt_lengths]
    return PortLogits(got, prefill_logits(adapter, port, batch.rows, ends))


def logits_error(subject: Subject, model: Path, adapter: StackAdapter) -> tuple[float, float]:
    """Relative error of fp32 logits on ragged rows: through decode steps, and through prefill alone."""
    return _errors(port_logits(subject, model, adapter), expected_logits(model))


def _errors(got: PortLogits, expected: Tensor) -> tuple[float, float]:
    return _relative(got.decode, expected), _relative(got.prefill, expected[:, 3])


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def compose(model: Path, folder: Path) -> Path:
    """The port of a family's model from recipes, without plan and unit tests.

    Raises:
        EquiportError: the fingerprint has questions or parts that no recipe serves.
    """
    found = fingerprint(model)
    composer = Composer(found, dict.fromkeys(block.block for block in placed_blocks(found)))
    lacking = [*(question.id for question in found.questions), *found.unsupported, *composer.unserved()]
    lacking += sorted(set(composer.blocks) - {recipe.block for recipe in composer.recipes})
    if lacking:
        raise EquiportError(f"no recipes for it: {', '.join(lacking)}", where=model)
    return write_modeling(composer, folder)


def main() -> None:
    """Judge each family below WORK; its model and port are made where they are not there yet."""
    from safetensors.torch import save_file

    out, work, stack, *names = sys.argv[1:]
    torch.set_num_threads(1)
    adapter = load_adapter(stack)
    tier = adapter.check_environment().tier.value
    for name in names:
        folder, clock = folder_of(name, Path(work)), time.monotonic()
        model, said, figures = folder / "model", [], {}
        try:
            if not model.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                write_model(name, model)
            port = next((folder / "src").glob("modeling_*.py"), None) or compose(model, folder / "src")
            judged = judge(port, model, folder / f"exp-{tier}", adapter)
            said, figures = judged.failures, {"r32": judged.r32, "r": judged.r}
            save_file({"logits": judged.logits.contiguous()}, folder / f"logits-{tier}.safetensors")
        except EquiportError as error:
            said = [error.line()]
        verdict = Verdict.FAIL if said else Verdict.PASS
        seconds = round(time.monotonic() - clock, 1)
        row = {"tier": tier, "verdict": verdict.value, "seconds": seconds, "said": "; ".join(said), **figures}
        with open(out, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"family": name, **row}) + "\n")
    # process groups of a serving stack may hang interpreter shutdown
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
