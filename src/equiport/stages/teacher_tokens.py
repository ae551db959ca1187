"""Prompts as token ids and the fp32 reference's greedy continuations: made once, stored in the experiment."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.experiment.hashing import model_files, sha256
from equiport.fixtures.prompts import PROMPTS, draw_prompts, read_prompts
from equiport.reference.logits import greedy
from equiport.reference.model import load_reference, quiet_transformers
from equiport.stages.frame import StageContext, vocabulary_size

FILE_NAME = "teacher_tokens.json"


class TeacherTokens(BaseModel):
    """`sequences[b]` = `prompts[b]` + greedy tokens of ref_fp32. `made_from`: sha256 of the model's files."""

    source: str
    texts: list[str]
    prompts: list[list[int]]
    sequences: list[list[int]]
    num_tokens: int
    made_from: dict[str, str]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    def continuation(self, row: int) -> tuple[int, ...]:
        """The reference's greedy tokens of one prompt."""
        return tuple(self.sequences[row][len(self.prompts[row]) :])


def teacher_tokens(context: StageContext, num_tokens: int, prompts_file: Path | None) -> TeacherTokens:
    """The experiment's stored tokens where they still fit, else new ones (stored when there is an experiment)."""
    folder = context.weights_folder()
    made_from = {path.name: sha256(path) for path in model_files(folder)}
    source = sha256(prompts_file) if prompts_file else "built-in prompts"
    stored = context.experiment.results / FILE_NAME if context.experiment else None
    if stored is not None and stored.is_file():
        kept = _stored(stored)
        if kept.made_from == made_from and kept.num_tokens == num_tokens and kept.source == source:
            return kept
    texts = list(read_prompts(prompts_file)) if prompts_file else list(PROMPTS)
    prompts = _encode(folder, texts, context.options.seed)
    if prompts is None:
        texts, prompts = [], draw_prompts(vocabulary_size(folder), context.options.seed)
    with context.progress.step(f"greedy tokens of the fp32 reference, {len(prompts)} prompts x {num_tokens}"):
        model = load_reference(folder, torch.float32)
        with quiet_transformers():
            continuations = greedy(model, prompts, num_tokens)
        del model
    tokens = TeacherTokens(
        source=source,
        texts=texts,
        prompts=prompts,
        sequences=[prompt + tail for prompt, tail in zip(prompts, continuations, strict=True)],
        num_tokens=num_tokens,
        made_from=made_from,
    )
    if stored is not None:
        write_json(stored, tokens)
    return tokens


def _stored(file: Path) -> TeacherTokens:
    remedy = "Delete it to have it made again."
    try:
        return TeacherTokens.model_validate(read_json(file, remedy=remedy))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(f"is damaged: {first['msg']}", where=file, field=field, remedy=remedy) from None


def _encode(folder: Path, texts: list[str], seed: int) -> list[list[int]] | None:
    """Token ids by the folder's tokenizer; None if it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
            encoded = [list(tokenizer(text)["input_ids"]) for text in texts]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise EquiportError(
            f"the tokenizer does not load: {str(error).splitlines()[0][:200]}",
            where=folder,
            remedy="Restore its files.",
        ) from error
    if not all(encoded):
        raise EquiportError("the tokenizer gives no tokens for a prompt", where=folder, field="--prompts")
    return encoded
