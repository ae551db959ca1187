"""One suspect to be explained: the source modules, the inputs they got, and what the target made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.fixtures.tokens import TokenBatch
from equiport.localize.anatomy import Part, part_of
from equiport.structure.mapping import ENTRY_TYPE, MappingEntry, module_of
from equiport.trace.module_io import take_tokens
from equiport.trace.reference import ReferenceIO, capture_reference
from equiport.trace.rotary import rotary_tables


@dataclass(frozen=True)
class Observation:
    """What the target gave in one phase: [N, ...], at (row, token) places [N, 2]; and ‖ref_bf16 − ref_fp32‖.

    `baseline` is the gate's unit there. Tables have no places; `settled` does to a source's tables what was done to
    the target's before they were compared.
    """

    phase: str
    target: Tensor
    baseline: float
    places: Tensor | None
    settled: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """A suspect under one fixture and seed. `model` is the live source model, in the dtype of `feed`.

    `first_length`: prompt length of the first row of the target's run, which may have held more rows than `batch`.
    """

    model: nn.Module
    sources: tuple[str, ...]
    entry: MappingEntry
    batch: TokenBatch
    feed: ReferenceIO
    observations: tuple[Observation, ...]
    first_length: int | None = None

    @property
    def config(self) -> Any:
        """The source model's config object."""
        return self.model.config

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The source modules under suspicion; of the way to the first layer, that layer."""
        return tuple(self.model.get_submodule(module_of(path)) for path in self.sources)

    @property
    def is_entry(self) -> bool:
        """Whether the suspect is the way to the first layer: what that layer is given."""
        return self.entry.component_type == ENTRY_TYPE

    def sites(self, *parts: Part) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of the parts at or inside the suspect; of the whole model those outside its layers, as of the
        way to the first layer."""
        for path in ("",) if self.is_entry else self.sources:
            for inner, module in self.model.get_submodule(path).named_modules():
                if not path and any(step.isdigit() for step in inner.split(".")):
                    continue
                if part_of(module) in parts:
                    yield f"{path}.{inner}".strip("."), module

    def number(self, *names: str) -> float | None:
        """The first numeric value among config fields of these names."""
        for name in names:
            value = getattr(self.config, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return None

    def outputs(self) -> dict[str, Tensor]:
        """What the source modules give now, edits included, at the target's places: phase -> [N, ...]."""
        if self.observations[0].places is None:
            table = rotary_tables(self.modules[0], next(self.model.parameters()).dtype)
            if isinstance(table, str):
                return {}
            settled = self.observations[0].settled
            return {self.observations[0].phase: settled(table) if settled else table}
        found = capture_reference(self.model, self.batch, self.sources, feed=self.feed).outputs
        if any(path not in found for path in self.sources):
            return {}
        return {item.phase: self._at(found, item) for item in self.observations}

    def _at(self, found: Mapping[str, Tensor], item: Observation) -> Tensor:
        assert item.places is not None
        value = torch.cat([take_tokens(found[path], item.places) for path in self.sources], dim=-1)
        return self.entry.aligned((value, value))[0]

    def distance(self, outputs: Mapping[str, Tensor]) -> float:
        """R32 of the target against these outputs, pooled over phases; infinite where they do not compare."""
        error, unit = 0.0, 0.0
        for item in self.observations:
            value = outputs.get(item.phase)
            if value is None or value.shape != item.target.shape:
                return float("inf")
            error += float((item.target.double() - value.double()).pow(2).sum())
            unit += item.baseline**2
        if not error:
            return 0.0  # also where the baseline is exact: lookups
        ratio = (error / unit) ** 0.5 if unit else float("inf")
        return ratio if ratio == ratio else float("inf")

    def worst_place(self, outputs: Mapping[str, Tensor]) -> float:
        """The largest R32 of a single place, in units of the mean baseline of a place."""
        worst = 0.0
        for item in self.observations:
            value = outputs[item.phase]
            errors = (item.target.double() - value.double()).flatten(1).pow(2).sum(dim=1)
            unit = item.baseline / max(1, len(errors)) ** 0.5
            largest = float(errors.max()) ** 0.5
            worst = max(worst, largest / unit if unit else float("inf") if largest else 0.0)
        return worst


def observed(targets: Sequence[Observation]) -> Tensor:
    """All target values of a case in one [N, features] tensor."""
    return torch.cat([item.target.double().flatten(1) for item in targets])


def predicted(outputs: Mapping[str, Tensor], targets: Sequence[Observation]) -> Tensor:
    """The source's values in the same order."""
    return torch.cat([outputs[item.phase].double().flatten(1) for item in targets])
