"""The component mapping of a patched port: a patch of the conversion changes which source weights a module holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from equiport.experiment import Experiment
from equiport.fixtures.folder import has_weights, tensor_headers
from equiport.reference.model import skeleton
from equiport.reference.stored_names import loaded_names
from equiport.stacks.contract import StackAdapter
from equiport.stages.component_fixtures import mapping_of
from equiport.stages.frame import Subject
from equiport.structure.mapping import ComponentMapping, MappingEntry, fill, save_mapping
from equiport.structure.propose import propose_mapping
from equiport.structure.provenance import trace_provenance

FILE_NAME = "component_mapping_patched.json"


def with_patched_mapping(
    experiment: Experiment, subject: Subject, adapter: StackAdapter, weights: Path
) -> tuple[Experiment, list[str]]:
    """The experiment with the mapping that holds under the patches applied, and the components that it changes.

    Components whose weights come from elsewhere now are compared with the module that they come from; what the mapping
    says of others stays. `weights`: the HF folder of the experiment; stage 0's tiny fixture is used where it made one.
    """
    mapping = mapping_of(experiment)
    source = skeleton(subject.model_path)
    adapter.init_distributed(subject.tp_degree)
    classes = subject.classes
    target = adapter.create_model(subject.modeling_file, classes.inner, classes.config, weights)
    tiny = experiment.root / "fixtures" / "provenance"
    folder = tiny if has_weights(tiny) else weights
    provenance = trace_provenance(adapter, subject.modeling_file, classes, folder)
    provenance = provenance.loaded(loaded_names(source, [header.name for header in tensor_headers(folder)]))
    proposed = propose_mapping(source, adapter.inner_model(target), provenance)
    found = {
        targets[0]: (entry, sources[0])
        for entry in proposed.components
        if len(entry.source) == len(entry.target) == 1
        for sources, targets, _ in entry.instances()
    }
    entries = tuple(_moved(entry, found) for entry in mapping.entries)
    changed = [new.name for new, old in zip(entries, mapping.entries, strict=True) if new != old]
    if not changed:
        return experiment, []
    file = save_mapping(experiment.results / FILE_NAME, ComponentMapping(entries))
    return replace(experiment, mapping_name=str(file.relative_to(experiment.root))), changed


def _moved(entry: MappingEntry, found: Mapping[str, tuple[MappingEntry, str]]) -> MappingEntry:
    """The entry with the source that its weights come from, if that is one module for all its instances."""
    if len(entry.source) != 1 or len(entry.target) != 1:
        return entry
    now = [(index, found.get(targets[0])) for _, targets, index in entry.instances()]
    holders = {id(held[0]): held[0] for _, held in now if held is not None}
    if len(holders) != 1 or any(held is None for _, held in now):
        return entry
    (holder,) = holders.values()
    pattern = holder.source[0] if entry.indices else next(held[1] for _, held in now if held is not None)
    if any(held is not None and held[1] != fill(pattern, index) for index, held in now):
        return entry
    if pattern == entry.source[0] and holder.align == entry.align:
        return entry
    return replace(entry, source=(pattern,), align=holder.align)
