"""Embedding models: target against source, prompt by prompt. No stage of the pipeline: there are no logits."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from equiport import __version__
from equiport.compare.embedding_thresholds import EmbeddingThresholds, load_embedding_thresholds
from equiport.compare.embeddings import EmbeddingComparison, EmbeddingTensors, Precision, compare_embeddings
from equiport.compare.gates import Figure
from equiport.compare.gates_embeddings import embedding_gate
from equiport.compare.numbers import Frozen, Number
from equiport.compare.reasons import ReasonCode
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import ReasonRecord
from equiport.experiment.atomic import read_json, write_json
from equiport.experiment.hashing import hash_inputs, model_files, sha256
from equiport.fixtures.embedding_plan import EmbeddingPlan, make_plan
from equiport.fixtures.embedding_prompts import EMBEDDING_PROMPTS, read_embedding_prompts
from equiport.fixtures.folder import read_config
from equiport.reference.embedder import check_lengths, encoder_of
from equiport.reference.pooling import Pooling, PoolingMode, read_pooling
from equiport.stages.embedding_reference import ReferenceVectors, explain, measure_reference
from equiport.stages.embedding_targets import EmbeddingTarget, TargetVectors, save_tensors
from equiport.stages.progress import Progress

RESULT_NAME = "embeddings.json"
VECTORS_NAME = "embeddings.safetensors"
SCHEMA_VERSION = 1
_TOKENIZER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "special_tokens_map.json",
                    "added_tokens.json", "config_sentence_transformers.json")  # fmt: skip


@dataclass(frozen=True)
class EmbeddingOptions:
    """What is compared, and how. `out` None: nothing is written. `precision`: what the target computes in."""

    model: Path
    pooling: PoolingMode | None = None
    normalize: bool | None = None
    prompts: Path | None = None
    precision: Precision = "bf16"
    batch_size: int = 8
    thresholds: Path | None = None
    out: Path | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Question:
    """What both sides are asked: the source's pooling and the plan."""

    pooling: Pooling
    plan: EmbeddingPlan


class FigureRecord(Frozen):
    """A `Figure`, as stored."""

    name: str
    value: Number
    limit: Number | None = None


class PoolingRecord(Frozen):
    """How the reference was pooled, and who says so."""

    mode: PoolingMode
    normalize: bool
    origin: str


class EmbeddingResult(BaseModel):
    """Verdict and evidence. `inputs` maps a path to its sha256; `evidence` that of the vectors beside the result."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    kind: Literal["embeddings"] = "embeddings"
    verdict: Verdict
    reasons: list[ReasonRecord] = Field(default_factory=list)
    hints: list[str] = Field(default_factory=list)
    notes: list[ReasonRecord] = Field(default_factory=list)
    figures: list[FigureRecord] = Field(default_factory=list)
    blind_spots: list[str] = Field(default_factory=list)
    comparison: EmbeddingComparison
    pooling: PoolingRecord
    reference: str
    target: str
    plan: str
    layouts: list[str] = Field(default_factory=list)
    thresholds: EmbeddingThresholds
    inputs: dict[str, str] = Field(default_factory=dict)
    evidence: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    tool_version: str = ""


def ask(options: EmbeddingOptions) -> Question:
    """Read pooling, prompts and tokenizer, and lay out what both sides embed.

    Raises:
        EquiportError: bad or contradicting files, a pooling that nobody says, prompts that do not fit the model.
    """
    pooling = read_pooling(options.model, options.pooling, options.normalize)
    read_config(pooling.backbone)
    prompts = read_embedding_prompts(options.prompts) if options.prompts else EMBEDDING_PROMPTS
    where = options.prompts or options.model
    plan = make_plan(prompts, encoder_of(pooling), options.batch_size, where)
    check_lengths(pooling, plan.items)
    return Question(pooling, plan)


def run_embeddings(options: EmbeddingOptions, target: EmbeddingTarget) -> EmbeddingResult:
    """Ask the target, then the source; judge; write result and vectors into `options.out`.

    Raises:
        EquiportError: bad input, or a target that does not answer what it is asked.
    """
    started, clock = datetime.now(timezone.utc), time.monotonic()
    limits = load_embedding_thresholds(options.thresholds) if options.thresholds else EmbeddingThresholds()
    progress = Progress(quiet=options.quiet)
    question = ask(options)
    pooling, plan = question.pooling, question.plan
    inputs = [*_model_inputs(options.model, pooling), *target.files]
    inputs += [path for path in (options.prompts, options.thresholds) if path is not None]
    hashed = hash_inputs(dict.fromkeys(inputs), options.out)
    with progress.step(f"target: {target.name}"):
        theirs = target.vectors(plan)
    with progress.step("source, fp32 and bf16"):
        source = measure_reference(pooling, plan)
    found = compare_embeddings(_tensors(theirs, source, plan, options.precision), plan.labels)
    gate = embedding_gate(found, limits)
    codes = {item.code for item in gate.reasons}
    hints = list(theirs.notes)
    if ReasonCode.EMBEDDING_COSINE.value in codes:
        with progress.step("what the source would have to do to give these vectors"):
            noise = limits.noise_factor * max(row.baseline for row in found.prompts)
            hints += explain(pooling, plan, theirs.alone, 1 - max(1 - limits.cosine, noise))
    result = EmbeddingResult(
        verdict=gate.verdict,
        reasons=[ReasonRecord.of(item) for item in gate.reasons],
        hints=hints,
        notes=[ReasonRecord.of(item) for item in gate.notes],
        figures=[_figure(item) for item in gate.figures],
        blind_spots=[
            *(item.message for item in gate.blind_spots),
            *theirs.blind_spots,
            *_blind_spots(options, question, source, theirs),
        ],
        comparison=found,
        pooling=PoolingRecord(mode=pooling.mode, normalize=pooling.normalize, origin=pooling.origin),
        reference=f"transformers {_version()} {source.class_name}, CPU, eager",
        target=target.name,
        plan=plan.digest,
        layouts=list(source.layouts),
        thresholds=limits,
        inputs=hashed,
        settings={"precision": options.precision, "batch_size": options.batch_size},
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 3),
        tool_version=__version__,
    )
    if options.out is not None:
        vectors = _save(options.out / VECTORS_NAME, theirs, source, plan)
        result.evidence = {vectors.name: sha256(vectors)}
        write_json(options.out / RESULT_NAME, result)
    return result


def load_embedding_result(path: Path) -> EmbeddingResult:
    """Read a stored result.

    Raises:
        EquiportError: missing, no JSON, or not of this schema.
    """
    remedy = "Run `equiport embeddings` again."
    try:
        return EmbeddingResult.model_validate(read_json(path, remedy=remedy))
    except ValueError as error:
        raise EquiportError(f"is no result of embeddings: {error}", where=path, remedy=remedy) from None


def _tensors(
    theirs: TargetVectors, source: ReferenceVectors, plan: EmbeddingPlan, precision: Precision
) -> EmbeddingTensors:
    return EmbeddingTensors(
        theirs.alone,
        source.bf16,
        source.fp32,
        theirs.batched,
        theirs.swapped,
        plan.swaps,
        source.noise(precision),
        plan.padded,
        precision,
    )


def _model_inputs(folder: Path, pooling: Pooling) -> list[Path]:
    extra = [place / name for place in dict.fromkeys((pooling.backbone, folder)) for name in _TOKENIZER_FILES]
    return [*model_files(pooling.backbone), *pooling.files, *(path for path in extra if path.is_file())]


def _blind_spots(
    options: EmbeddingOptions, question: Question, source: ReferenceVectors, theirs: TargetVectors
) -> list[str]:
    plan, pooling = question.plan, question.pooling
    spots = [f"prompts of more than {max(len(item.ids) for item in plan.items)} tokens"]
    if options.precision == "bf16":
        spots.append("faults below the error of bf16: a target in fp32 would show them")
    unmoved = [label for label, swapped in zip(plan.labels, plan.swaps, strict=True) if not swapped]
    if theirs.swapped is not None and unmoved:
        spots.append(
            f"neighbours of {len(unmoved)} prompts were not swapped: no other text of as many tokens was found"
        )
    lacking = [side for side in ("right", "left") if side not in source.layouts]
    if lacking:
        spots.append(
            f"the source class itself changes with padding on the {' and '.join(lacking)}: its batch noise is not of it"
        )
    if source.unread:
        spots.append(
            f"{len(source.unread)} stored tensors that the source class does not read, first {source.unread[0]}"
        )
    if read_config(pooling.backbone).get("auto_map"):
        spots.append(
            "the folder brings modeling code of its own, which was not run: the reference is transformers' class"
        )
    file = options.model / "config_sentence_transformers.json"
    said = read_json(file) if file.is_file() else {}
    if isinstance(said, dict) and said.get("default_prompt_name"):
        spots.append(f"the model's default prompt {said['default_prompt_name']!r} was not put before the texts")
    return spots


def _save(path: Path, theirs: TargetVectors, source: ReferenceVectors, plan: EmbeddingPlan) -> Path:
    named = {"alone": theirs.alone, "batched": theirs.batched, "swapped": theirs.swapped}
    given: dict[str, torch.Tensor] = {name: tensor for name, tensor in named.items() if tensor is not None}
    return save_tensors(path, {**given, "ref_bf16": source.bf16, "ref_fp32": source.fp32}, plan)


def _figure(item: Figure) -> FigureRecord:
    return FigureRecord(name=item.name, value=item.value, limit=item.limit)


def _version() -> str:
    import transformers

    return str(transformers.__version__)
