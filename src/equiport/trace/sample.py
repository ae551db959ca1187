"""One component's tensors at one layer, in one phase, under one fixture; and their store between processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from equiport.errors import EquiportError
from equiport.reference.model import Fixture
from equiport.structure.mapping import MappingEntry

NEVER_CALLED = "is not called by the port; if its weights are used at all, that is seen in the module around it"
ONLY_PORT_CALLS = "is called by the port and never by the source; that is seen in the module around it"
#: Phases that a source module gives again when it is run on the stored tokens, or called for its near tables.
REPRODUCED = ("prefill", "decode", "tables")
_TENSORS = ("ref_fp32", "ref_bf16", "target", "target_fp32")
_STORED = (*_TENSORS, "places")


@dataclass(frozen=True)
class ComponentSample:
    """What the comparator is given. Tensors are [tokens, ...]; `problem` says why there are none.

    `places` [tokens, 2] are the (row, token) of each in the seed's own batch; tables have none. Of all `tokens`,
    `unsure` ones were routed within the noise: their bf16 error counts on neither side.
    """

    component: str
    component_type: str
    module: str
    index: tuple[int, ...]
    fixture: str
    seed: int
    phase: str
    reduction_split: int
    ref_fp32: Tensor | None = None
    ref_bf16: Tensor | None = None
    target: Tensor | None = None
    target_fp32: Tensor | None = None
    places: Tensor | None = None
    problem: str = ""
    tokens: int = 0
    unsure: int = 0

    @classmethod
    def of(
        cls,
        entry: MappingEntry,
        module: str,
        index: tuple[int, ...],
        fixture: Fixture,
        phase: str,
        tensors: tuple[Tensor, ...],
        problem: str = "",
        *,
        seed: int | None = None,
        places: Tensor | None = None,
    ) -> ComponentSample:
        """From a mapping entry and up to four tensors in the order ref_fp32, ref_bf16, target, target_fp32."""
        values: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=False))
        return cls(
            entry.name,
            entry.component_type,
            module,
            index,
            fixture.label,
            fixture.seed if seed is None else seed,
            phase,
            entry.reduction_split or 1,
            problem=problem,
            places=places,
            **values,
        )

    @property
    def name(self) -> str:
        """Name of the comparison: module, phase, fixture."""
        return f"{self.module} [{self.phase}, {self.fixture_kind}, seed {self.seed}]"

    @property
    def fixture_kind(self) -> str:
        """real, perturbed or stress."""
        return self.fixture.split("-")[0]

    @property
    def layer(self) -> int | None:
        """The layer index, if the component is in a layer."""
        return self.index[0] if self.index else None


def slug(component: str) -> str:
    """A file name for a component."""
    return hashlib.sha256(component.encode()).hexdigest()[:16]


def save_samples(folder: Path, samples: Iterable[ComponentSample]) -> None:
    """Store samples in one safetensors file a component and run; scalars travel as metadata."""
    grouped: dict[tuple[str, str, int], list[ComponentSample]] = {}
    for sample in samples:
        grouped.setdefault((sample.component, sample.fixture_kind, sample.seed), []).append(sample)
    folder.mkdir(parents=True, exist_ok=True)
    for (component, fixture, seed), group in grouped.items():
        tensors: dict[str, Tensor] = {}
        facts = []
        for number, sample in enumerate(group):
            for name in _STORED:
                value = getattr(sample, name)
                if value is not None:
                    tensors[f"{number}.{name}"] = value.clone(memory_format=torch.contiguous_format)
            facts.append({k: v for k, v in sample.__dict__.items() if k not in _STORED})
        file = folder / f"{slug(component)}-{fixture}-{seed}.safetensors"
        save_file(tensors, str(file), {"samples": json.dumps(facts)})


def load_samples(folder: Path, component: str) -> list[ComponentSample]:
    """The stored samples of one component, over all fixtures.

    Raises:
        EquiportError: nothing was traced for it.
    """
    from safetensors import safe_open

    files = sorted(folder.glob(f"{slug(component)}-*.safetensors"))
    if not files:
        raise EquiportError(f"no trace of component {component!r}", where=folder, remedy="Run run_stage2.py again.")
    samples = []
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            facts = json.loads(handle.metadata()["samples"])
        tensors = load_file(str(file))
        for number, fact in enumerate(facts):
            values: dict[str, Any] = {name: tensors.get(f"{number}.{name}") for name in _STORED}
            samples.append(ComponentSample(**{**fact, "index": tuple(fact["index"]), **values}))
    return samples
