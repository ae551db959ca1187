"""Forced and greedy logits of many short texts, from the port and from the source model, with few forwards."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from equiport.compare.verdict import Reason
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.stacks.teacher_forcing import decode_logits
from equiport.stages.bf16_products import fast_bf16_products
from equiport.stages.port_run import load_reasons, make_port

Tokens = tuple[int, ...]
Ended = Callable[[int, list[int]], bool]
"""(row, its new tokens) -> whether the row is complete."""
_BATCH_TOKENS = 1024
_BATCH_ROWS = 64
_LOGIT_ELEMENTS = 64 << 20
_NOT_WORTH_A_MODEL = 4000
"""Tokens of padding that cost less than making the model once more."""


@dataclass(frozen=True)
class Row:
    """A text to score: logits are wanted at its last `steps` positions."""

    tokens: Tokens
    steps: int


class Engine(ABC):
    """One side of the comparison."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    @abstractmethod
    def score(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
        """Row numbers and their next-token logits [n, steps, V] float32, batch by batch, in any order."""

    @abstractmethod
    def generate(self, prompts: Sequence[Tokens], most: int, ended: Ended) -> list[list[int]]:
        """Greedy tokens of each prompt, at most `most`, up to and with the one at which `ended` says so."""

    @abstractmethod
    def close(self) -> None:
        """Drop the model."""

    def _batch_size(self, length: int, steps: int) -> int:
        by_logits = _LOGIT_ELEMENTS // (max(steps, 1) * self._vocabulary)
        return max(1, min(_BATCH_ROWS, _BATCH_TOKENS // length, by_logits))


class ReferenceEngine(Engine):
    """The source model in the port's dtype. Rows of a batch have equal lengths, so nothing is padded."""

    def __init__(self, folder: Path, dtype: torch.dtype, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self._model: nn.Module | None = load_reference(folder, dtype)

    @property
    def model(self) -> nn.Module:
        """The loaded model."""
        assert self._model is not None
        return self._model

    def score(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
        """See `Engine`."""
        for numbers in _alike(rows):
            length, steps = len(rows[numbers[0]].tokens), rows[numbers[0]].steps
            # HF computes logits of all positions
            size = self._batch_size(length, length)
            for first in range(0, len(numbers), size):
                batch = numbers[first : first + size]
                ids = torch.tensor([rows[number].tokens for number in batch])
                with torch.no_grad(), fast_bf16_products():
                    logits = self.model(input_ids=ids, use_cache=False).logits
                yield batch, logits[:, -steps:].float()

    def generate(self, prompts: Sequence[Tokens], most: int, ended: Ended) -> list[list[int]]:
        """See `Engine`."""
        out: list[list[int]] = [[] for _ in prompts]
        for numbers in _alike([Row(prompt, 1) for prompt in prompts]):
            size = self._batch_size(len(prompts[numbers[0]]) + most, 1)
            for first in range(0, len(numbers), size):
                batch = numbers[first : first + size]
                ids, cache = torch.tensor([prompts[number] for number in batch]), None
                open_rows = set(batch)
                while open_rows:
                    with torch.no_grad(), fast_bf16_products():
                        said = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
                    ids, cache = said.logits[:, -1].argmax(-1, keepdim=True), said.past_key_values
                    _append(out, batch, ids[:, 0].tolist(), open_rows, most, ended)
        return out

    def close(self) -> None:
        """See `Engine`."""
        self._model = None
        gc.collect()


class PortEngine(Engine):
    """The port. A model is made for each class of lengths, because a prefill is as wide as the model's cache."""

    def __init__(
        self, adapter: StackAdapter, classes: PortClasses, folder: Path, dtype: torch.dtype, vocabulary: int, tp: int
    ) -> None:
        super().__init__(vocabulary)
        self._adapter, self._classes, self._folder, self._dtype, self._tp = adapter, classes, folder, dtype, tp
        self.findings: list[Reason] = []

    def score(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Tensor]]:
        """See `Engine`."""
        for numbers in length_classes([len(row.tokens) for row in rows]):
            longest = max(len(rows[number].tokens) for number in numbers)
            most = max(rows[number].steps for number in numbers)
            size = _even(len(numbers), self._batch_size(longest, most))
            model = self._made(size, longest)
            for group in _by_steps(rows, numbers):
                steps = rows[group[0]].steps
                for first in range(0, len(group), size):
                    batch = group[first : first + size]
                    texts = [rows[number].tokens for number in batch]
                    with fast_bf16_products():
                        lengths = [len(text) - steps + 1 for text in texts]
                        yield batch, decode_logits(self._adapter, model, texts, lengths, steps)
            del model
            gc.collect()

    def generate(self, prompts: Sequence[Tokens], most: int, ended: Ended) -> list[list[int]]:
        """See `Engine`."""
        out: list[list[int]] = [[] for _ in prompts]
        for numbers in length_classes([len(prompt) + most for prompt in prompts]):
            longest = max(len(prompts[number]) for number in numbers)
            size = _even(len(numbers), self._batch_size(longest + most, 1))
            model = self._made(size, longest + most)
            for first in range(0, len(numbers), size):
                self._greedy(model, numbers[first : first + size], size, prompts, most, ended, out)
            del model
            gc.collect()
        return out

    def close(self) -> None:
        """See `Engine`."""
        gc.collect()

    def _greedy(
        self, model: nn.Module, batch: list[int], size: int, prompts: Sequence[Tokens], most: int, ended: Ended,
        out: list[list[int]],
    ) -> None:  # fmt: skip
        filled = [prompts[number] for number in [*batch, *[batch[-1]] * (size - len(batch))]]
        lengths = torch.tensor([len(prompt) for prompt in filled])
        ids = torch.tensor([[*prompt, *[0] * (int(lengths.max()) - len(prompt))] for prompt in filled])
        open_rows, step = set(batch), 0
        with fast_bf16_products():
            logits = self._adapter.forward(model, ids, lengths=lengths)
            while True:
                token = logits.argmax(-1, keepdim=True)
                _append(out, batch, token[:, 0].tolist(), open_rows, most, ended)
                if not open_rows:
                    return
                logits = self._adapter.forward(model, token, positions=lengths + step)
                step += 1

    def _made(self, batch_size: int, seq_len: int) -> nn.Module:
        model, report = make_port(
            self._adapter, self._classes, self._folder, self._dtype, batch_size=batch_size, seq_len=seq_len,
            tp_degree=self._tp,
        )  # fmt: skip
        self.findings = load_reasons(report)
        return model


def _append(
    out: list[list[int]], batch: list[int], tokens: list[int], open_rows: set[int], most: int, ended: Ended
) -> None:
    for number, token in zip(batch, tokens, strict=False):
        if number in open_rows:
            out[number].append(token)
            if len(out[number]) >= most or ended(number, out[number]):
                open_rows.discard(number)


def _alike(rows: Sequence[Row]) -> list[list[int]]:
    """Row numbers in groups of equal length and steps."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((len(row.tokens), row.steps), []).append(number)
    return list(groups.values())


def _by_steps(rows: Sequence[Row], numbers: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number in numbers:
        groups.setdefault(rows[number].steps, []).append(number)
    return list(groups.values())


def length_classes(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers in classes of similar length, shortest first; few rows join the next longer class."""
    classes: list[list[int]] = []
    waiting: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if waiting:
            longest = lengths[waiting[-1]]
            spared = len(waiting) * (lengths[number] - longest)
            if lengths[number] > 2 * lengths[waiting[0]] and spared + len(waiting) > _NOT_WORTH_A_MODEL:
                classes.append(waiting)
                waiting = []
        waiting.append(number)
    return [*classes, waiting] if waiting else classes


def _even(rows: int, most: int) -> int:
    """A batch size of at most `most` that leaves the last batch nearly full."""
    batches = -(-rows // most)
    return -(-rows // batches)
