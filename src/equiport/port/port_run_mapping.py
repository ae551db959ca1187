"""Source modules that a port has no counterpart for, explained in component_mapping.json as a reader would.

- A fused projection that the port splits into q, k and v: no output of the port has its shape. It and the three are
  compared inside the attention around them.
- Dropout: the identity, where nothing is trained.

Stage 0 then validates the mapping as a hand-written one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from equiport.experiment import Experiment
from equiport.reference.model import skeleton
from equiport.stages.component_fixtures import mapping_of
from equiport.structure.mapping import ComponentMapping, MappingEntry, save_mapping
from equiport.structure.tree import with_index

_SPLIT = ("k_proj", "q_proj", "v_proj")


def explain_unmatched(experiment: Experiment, model: Path) -> tuple[str, ...]:
    """Complete the mapping that stage 0 proposed; returns what was explained. Nothing is written where nothing is."""
    mapping = mapping_of(experiment)
    entries, split = _without_split(mapping)
    dropouts = list(_dropouts(skeleton(model), mapping))
    if not split and not dropouts:
        return ()
    save_mapping(experiment.mapping_file, ComponentMapping((*entries, *dropouts)))
    return (*split, *(entry.source[0] for entry in dropouts))


def _without_split(mapping: ComponentMapping) -> tuple[list[MappingEntry], tuple[str, ...]]:
    by_source: dict[tuple[str, ...], list[MappingEntry]] = {}
    for entry in mapping.components:
        by_source.setdefault(entry.source, []).append(entry)
    split = {
        source: found
        for source, found in by_source.items()
        if tuple(sorted(entry.target[0].rsplit(".", 1)[-1] for entry in found)) == _SPLIT
    }
    entries: list[MappingEntry] = []
    for entry in mapping.entries:
        if entry.source not in split or not entry.is_component:
            entries.append(entry)
            continue
        source = entry.source[0]
        plain = replace(entry, component_type="", reduction_split=None, align="")
        if entry is split[entry.source][0]:
            why = "one projection for q, k and v, which the port splits: compared inside the attention"
            entries.append(replace(plain, target=(), reasoning=why))
        entries.append(replace(plain, source=(), reasoning=f"rows of {source}: compared inside the attention"))
    return entries, tuple(source[0] for source in split)


def _dropouts(source: nn.Module, mapping: ComponentMapping) -> Iterator[MappingEntry]:
    told = {path for entry in mapping.entries for path in entry.source}
    found: dict[str, list[tuple[int, ...]]] = {}
    for path, module in source.named_modules():
        name, index = with_index(path)
        if isinstance(module, nn.Dropout) and name not in told:
            found.setdefault(name, []).append(index)
    for name, indices in found.items():
        why = "Dropout: the identity, where nothing is trained"
        yield MappingEntry((name,), (), why, tuple(index for index in indices if index))
