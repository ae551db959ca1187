"""Where a draft is to be applied: the source's modules, the port's modules that stand for them, and the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from equiport.localize.drafts import Draft
from equiport.stages.instances import InstanceRow
from equiport.structure.mapping import ComponentMapping, MappingEntry


class PatchPlan(BaseModel):
    """A draft and its places. `sources` and `targets` pair up, with `{i}` for the layer; a target is empty where the
    mapping names no single module, and in `not_called` where the port passes it by. `layers` None: every layer."""

    model_config = ConfigDict(frozen=True)

    draft: Draft
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    other: str = ""
    layers: tuple[int, ...] | None = None
    not_called: tuple[str, ...] = ()

    def anywhere(self) -> PatchPlan:
        """The plan without the layer that it was proven at."""
        return self.model_copy(update={"draft": self.draft.model_copy(update={"of": ()})})


def plan_patch(
    draft: Draft,
    entry: MappingEntry,
    layer: int | None,
    rows: Sequence[InstanceRow],
    mapping: ComponentMapping,
    not_called: Sequence[str],
) -> PatchPlan:
    """The plan for a cause that was proven on `entry` at `layer`; `rows` are the figures of that component."""
    other = str(getattr(draft, "other", ""))
    sources = tuple(_in_every_layer(path, entry, layer) for path in draft.of)
    layers = bad_layers(rows)
    if other:
        elsewhere = _in_every_layer(other, entry, layer)
        if any("{i}" in path for path in sources) and "{i}" not in elsewhere:
            # another layer's: proven for this one alone
            sources, layers = draft.of, None
        else:
            other = elsewhere
    targets = tuple(_target(path, mapping, layer) for path in sources)
    return PatchPlan(
        draft=draft,
        sources=sources,
        targets=targets,
        other=other,
        layers=layers if any("{i}" in path for path in sources) else None,
        not_called=tuple(path for path in targets if path in not_called),
    )


def bad_layers(rows: Sequence[InstanceRow]) -> tuple[int, ...] | None:
    """The layers that fail, over all fixtures; None where every layer of a failing fixture does, or none alone."""
    seen: dict[str, set[int]] = defaultdict(set)
    bad: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.layer is not None:
            seen[row.fixture].add(row.layer)
            if row.excess > 1:
                bad[row.fixture].add(row.layer)
    if all(found == seen[fixture] for fixture, found in bad.items()):
        return None
    return tuple(sorted(set().union(*bad.values())))


def _in_every_layer(path: str, entry: MappingEntry, layer: int | None) -> str:
    """`model.layers.0.mlp` of an entry `model.layers.{i}...` at layer 0 -> `model.layers.{i}.mlp`."""
    start, found, _ = entry.source[0].partition("{i}")
    here = f"{start}{layer}"
    if not found or not (path == here or path.startswith(here + ".")):
        return path
    return start + "{i}" + path[len(here) :]


def _target(path: str, mapping: ComponentMapping, layer: int | None) -> str:
    for entry in mapping.components:
        if len(entry.source) != 1 or len(entry.target) != 1:
            continue
        if entry.source[0] == path:
            return entry.target[0]
        for sources, targets, _ in entry.instances() if "{i}" not in path else ():
            if sources[0] == path:
                return targets[0]
    return ""
