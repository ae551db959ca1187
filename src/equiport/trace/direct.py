"""Modules whose input no hidden tensor carries are called directly, on both sides alike: rotary tables, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equiport.fixtures.folder import read_config
from equiport.reference.model import Fixture
from equiport.structure.mapping import MappingEntry
from equiport.trace.rotary import RotaryTables, far_positions, near_and_far, rounding_aside, switches_by_length
from equiport.trace.sample import ComponentSample
from equiport.trace.vocabulary import embedded_ids, vocabulary_table

_REFERENCES = ("ref_fp32", "ref_bf16")


@dataclass(frozen=True)
class DirectPair:
    """A source and a target module of one component at one layer."""

    entry: MappingEntry
    source: str
    target: str
    index: tuple[int, ...]


@dataclass
class DirectCalls:
    """What both sides gave, run by run: `take` a model, then make `samples`.

    `rotary` and `embeddings` are the pairs to call.
    """

    fixture: Fixture
    rotary: Sequence[DirectPair]
    embeddings: Sequence[DirectPair]
    _tables: dict[str, dict[str, RotaryTables]] = field(default_factory=dict)
    _rows: dict[str, dict[str, Tensor | str]] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)

    def take(self, run: str, model: nn.Module, dtype: torch.dtype) -> None:
        """Call the modules of one run: ref_fp32 (first), ref_bf16, target or target_fp32."""
        modules = dict(model.named_modules())
        far = far_positions(read_config(self.fixture.folder))
        tables, rows = self._tables.setdefault(run, {}), self._rows.setdefault(run, {})
        for pair in self.rotary:
            path = pair.source if run in _REFERENCES else pair.target
            if path not in tables:
                tables[path] = near_and_far(modules[path], dtype, far)
        for pair in self.embeddings:
            path = pair.source if run in _REFERENCES else pair.target
            if run == "ref_fp32":
                self._ids[pair.source] = embedded_ids(modules[path])
            rows[path] = vocabulary_table(modules[path], self._ids[pair.source])

    def samples(self) -> tuple[list[ComponentSample], list[str]]:
        """The samples, and what could not be compared (blind spots)."""
        found: list[ComponentSample] = []
        notes: dict[str, None] = {}
        for pair in self.rotary:
            found += self._rotary_samples(pair, notes)
        for pair in self.embeddings:
            found += self._vocabulary_samples(pair, notes)
        config = read_config(self.fixture.folder)
        if self.rotary and switches_by_length(config):
            notes["rotary tables beyond the original range: they switch with the sequence's length, and one call of "
                  "the tables alone does not tell"] = None  # fmt: skip
        return found, list(notes)

    def _rotary_samples(self, pair: DirectPair, notes: dict[str, None]) -> list[ComponentSample]:
        """Near and far tables of both sides.

        Another layout of the tables is the port's choice and no fault: then nothing is compared here, and what the
        tables do to q and k is seen in the attention.
        """
        sides = [self._tables[run][pair.source if run in _REFERENCES else pair.target] for run in self._tables]
        near = _aligned([side.near for side in sides])
        if isinstance(near, str):
            return [self._sample(pair, "tables", (), near)]
        tables = rounding_aside(torch.arange(len(near[0])), near[0], near)
        found = [self._sample(pair, "tables", tables)]
        far = far_positions(read_config(self.fixture.folder))
        if far is None:
            return found
        beyond = _aligned([side.far if side.far is not None else "has none" for side in sides])
        if isinstance(beyond, str):
            notes[f"{pair.entry.name}: positions from {int(far[0])} on are not compared: {beyond}"] = None
            return found
        return [*found, self._sample(pair, "far tables", rounding_aside(far, near[0], beyond))]

    def _vocabulary_samples(self, pair: DirectPair, notes: dict[str, None]) -> list[ComponentSample]:
        rows = _aligned([self._rows[run][pair.source if run in _REFERENCES else pair.target] for run in self._rows])
        if isinstance(rows, str):
            notes[f"{pair.entry.name}: ids that no fixture draws are not compared: {rows}"] = None
            return []
        return [self._sample(pair, "vocabulary", _rescaled(rows))]

    def _sample(self, pair: DirectPair, phase: str, tensors: tuple[Tensor, ...], problem: str = "") -> ComponentSample:
        return ComponentSample.of(pair.entry, pair.target, pair.index, self.fixture, phase, tensors, problem)


def _rescaled(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The source's sides times the port's factor, where the port scales every row alike; its rounding is set aside.

    That a factor belongs there, and how it rounds, is seen in what the layers are given; here the lookup counts.
    """
    ref, ours = rows[0], rows[-1]
    known = ~ref.isnan()
    if len(rows) < len(("ref_fp32", "ref_bf16", "target", "target_fp32")) or not torch.equal(known, ~ours.isnan()):
        return rows
    factor = float((ours[known] * ref[known]).sum() / ref[known].square().sum())
    if abs(factor - 1) < 1e-5 or not factor > 0:
        return rows
    for wanted, got, rounding in ((ref, ours, 1e-5), (rows[1], rows[2], 2**-7)):
        if not torch.equal(known, ~got.isnan()):
            return rows
        if bool(((got - factor * wanted).norm(dim=1) > rounding * factor * wanted.norm(dim=1)).any()):
            return rows
    scaled = ref * factor
    return (scaled, scaled, scaled, ours)


def _aligned(values: Sequence[Tensor | str]) -> tuple[Tensor, ...] | str:
    """The tensors of all runs in their order; or why they cannot be compared."""
    problem = next((value for value in values if isinstance(value, str)), "")
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    if problem:
        return problem
    if len({value.shape for value in tensors}) > 1:
        return f"tables are laid out as {tuple(tensors[2].shape)}, the source's as {tuple(tensors[0].shape)}"
    return tensors
