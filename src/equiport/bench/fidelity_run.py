"""What a port gives on one tier, and what its source gives: one process each.

`python -m equiport.bench.fidelity_run source|tier JOB OUT`: JOB is a JSON file of `SourceJob` or `TierJob`, OUT gets
the JSON of an `Ended`; logits stand beside it, OUT with the ending .safetensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from equiport.errors import EquiportError, OpenQuestionError

PROMPTS = (5, 17, 9)
STEPS = 6
SEQ_LEN = 32
SEED = 42

RAN, REFUSED, FAILED = "ran", "refused", "failed"


class SourceJob(BaseModel):
    """Make the tiny counterpart of `port` in `folder`; `model`: a folder or config.json that says which it is."""

    port: Path
    folder: Path
    model: Path | None = None


class TierJob(BaseModel):
    """Run `port` on the tier that the environment gives. `classes`: causal and config class. `dtypes`: by name."""

    port: Path
    folder: Path
    classes: tuple[str, str]
    dtypes: tuple[str, ...]


class Ended(BaseModel):
    """How it went. `status`: ran; refused (the stack, or the intake, does not serve it); failed.

    `phase`: what was under way. `notes`: what the intake guessed, or what the adapter had to supply. `lacking`: names
    that the port asked the stand-in for and did without. `unloaded`: weights that did not arrive, or have no place.
    """

    model_config = ConfigDict(frozen=True)

    status: str
    phase: str = ""
    said: str = ""
    tier: str = ""
    version: str = ""
    kind: str = ""
    model_type: str = ""
    classes: tuple[str, str] | None = None
    vocabulary: int = 0
    notes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()


def batch_of(config: dict[str, Any]) -> Any:
    """The token batch of the bench for a config.json: three ragged rows and six decode steps."""
    from equiport.fixtures.tokens import draw_batch, special_ids

    return draw_batch(int(config["vocab_size"]), PROMPTS, STEPS, SEED, special_ids(config))


def run_source(job: SourceJob, out: Path) -> Ended:
    """Inspect the port, write its counterpart's folder, and keep the source's fp32 logits [3, 1 + 6, V].

    An obstacle is an `Ended`, not an error.
    """
    import torch
    from safetensors.torch import save_file

    from equiport.intake.inspection import inspect_port
    from equiport.intake.source import source_folder
    from equiport.reference.logits import sequence_logits
    from equiport.reference.model import load_reference

    try:
        seen = inspect_port(job.port, model=job.model)
    except OpenQuestionError as error:
        return Ended(status=REFUSED, phase="inspection", said=error.line())
    known = {"kind": seen.kind.value, "model_type": seen.model_type or "", "notes": seen.notes}
    if seen.obstacle or seen.classes is None or seen.tiny is None:
        said = seen.obstacle or "; ".join(seen.not_validated)
        return Ended(status=REFUSED, phase="inspection", said=said, **known)
    if not (job.folder / "config.json").is_file():
        source_folder(seen, job.folder, seed=SEED)
    vocabulary = int(seen.tiny["vocab_size"])
    batch = batch_of(seen.tiny)
    reference = load_reference(job.folder, torch.float32)
    rows = zip(batch.rows, batch.prompt_lengths, strict=True)
    logits = torch.stack([sequence_logits(reference, row, length - 1)[: STEPS + 1] for row, length in rows])
    save_file({"float32": logits.float().contiguous()}, out.with_suffix(".safetensors"))
    classes = (seen.classes.causal, seen.classes.config)
    return Ended(status=RAN, classes=classes, vocabulary=vocabulary, **known)


def run_tier(job: TierJob, out: Path) -> Ended:
    """Prefill of three ragged rows and six decode steps [3, 1 + 6, V] in each dtype, by teacher forcing.

    What the port or its stack raises is an `Ended`, not an error.
    """
    import torch
    from safetensors.torch import save_file

    from equiport.fixtures.folder import read_config
    from equiport.stacks.detection import detect_stack
    from equiport.stacks.loading import load_adapter
    from equiport.stacks.teacher_forcing import decode_logits

    adapter = load_adapter(detect_stack(job.port))
    status = adapter.check_environment()
    stamp: dict[str, Any] = {"tier": status.tier.value, "version": status.version}
    batch = batch_of(read_config(job.folder))
    found, notes, unloaded, phase = {}, [], [], "making"
    try:
        for name in job.dtypes:
            dtype, phase = getattr(torch, name), f"making ({name})"
            torch.manual_seed(SEED)
            model = adapter.create_model(
                job.port, *job.classes, job.folder, dtype=dtype, batch_size=len(PROMPTS), seq_len=SEQ_LEN
            )
            phase = f"loading ({name})"
            report = adapter.load_weights(model, job.folder, dtype)
            notes += [note for note in report.notes if note not in notes]
            lost = (*report.missing, *report.unexpected, *report.mis_shaped)
            unloaded += [key for key in lost if key not in unloaded]
            phase = f"logits ({name})"
            found[name] = decode_logits(adapter, model, batch.rows, batch.prompt_lengths, STEPS + 1).contiguous()
    except Exception as error:
        said = error.line() if isinstance(error, EquiportError) else f"{type(error).__name__}: {error}"
        ended = REFUSED if _stack_refuses(error) else FAILED
        text = " ".join(said.split())[:600]
        return Ended(status=ended, phase=phase, said=text, lacking=_lacking(), notes=tuple(notes), **stamp)
    save_file(found, out.with_suffix(".safetensors"))
    return Ended(status=RAN, notes=tuple(notes), lacking=_lacking(), unloaded=tuple(unloaded), **stamp)


def _stack_refuses(error: BaseException | None) -> bool:
    """Whether the error, or what caused it, is a stand-in's or a fabricated kernel's refusal."""
    while error is not None:
        if type(error).__name__ in ("StandInMissing", "StandInRefused", "KernelAbsentError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lacking() -> tuple[str, ...]:
    """Names of the stack that the port was refused in this process, on the stand-in."""
    missing = sys.modules.get("neuronx_distributed._standin.missing")
    return tuple(dict.fromkeys(missing.missing_so_far())) if missing is not None else ()


def main() -> None:
    """Run one job; an `EquiportError` is told as a failure."""
    import torch

    from equiport.experiment.atomic import read_json, write_json

    what, job, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    try:
        if what == "source":
            ended = run_source(SourceJob.model_validate(read_json(job)), out)
        else:
            ended = run_tier(TierJob.model_validate(read_json(job)), out)
    except EquiportError as error:
        ended = Ended(status=FAILED, phase="inspection" if what == "source" else "making", said=error.line())
    write_json(out, ended)
    # process groups of a serving stack may hang interpreter shutdown
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
