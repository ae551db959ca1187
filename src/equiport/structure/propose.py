"""Propose the component mapping from weight provenance, module trees and the list of expected differences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from equiport.structure.mapping import ComponentMapping, MappingEntry, fill
from equiport.structure.provenance import Origin, Provenance, TensorProvenance
from equiport.structure.roles import (
    explanation,
    is_container,
    is_rotary,
    is_weightless_part,
    is_wrapper,
    owns_parameters,
)
from equiport.structure.tree import with_index

_Index = tuple[int, ...]
_BLOCKS = 64  # of a part of a fused projection, written into the mapping


@dataclass
class _Pair:
    """Instances of one component while they are collected."""

    indices: list[_Index] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)
    aligns: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Trees:
    """Both models with what the proposal needs to look up again and again."""

    source: nn.Module
    target: nn.Module
    provenance: Provenance
    aliases: dict[str, tuple[str, ...]]

    def tensors(self, path: str) -> list[TensorProvenance]:
        """Provenance of the target tensors below `path`."""
        return [tensor for tensor in self.provenance.tensors if tensor.target.startswith(path + ".")]

    def height(self, tensor: str) -> int:
        """Rows of a source parameter; 0 where the source has no such parameter."""
        parameters = dict(self.source.named_parameters(remove_duplicate=False))
        return parameters[tensor].shape[0] if tensor in parameters and parameters[tensor].dim() else 0

    def width(self, tensor: str) -> int:
        """Columns of a source parameter; 0 where the source has no such matrix."""
        parameters = dict(self.source.named_parameters(remove_duplicate=False))
        return parameters[tensor].shape[1] if tensor in parameters and parameters[tensor].dim() == 2 else 0

    def source_tensors(self, path: str) -> set[str]:
        """Names of the source's parameters below `path`."""
        return {name for name, _ in self.source.named_parameters() if name.startswith(path + ".")}


def propose_mapping(
    source: nn.Module, target: nn.Module, provenance: Provenance, *, reduction_split: int | None = None
) -> ComponentMapping:
    """Map every module of both trees, or explain why it has no counterpart.

    A target module with weights maps to the source modules that its weights came from; a module without weights of
    its own maps to the source module whose weights are those of its children (where a layer's do not fit, as in the
    other layers); rotary modules map by kind. `reduction_split` is noted on row-parallel projections.
    """
    trees = _Trees(source, target, provenance, _aliases(source))
    pairs: dict[tuple[tuple[str, ...], str], _Pair] = defaultdict(_Pair)
    found = {path: sources for path in _candidates(target) if (sources := _sources_of(trees, path))}
    for path, sources in {**found, **_by_majority(trees, found)}.items():
        pair = _file(pairs, sources, path)
        tensors = trees.tensors(path)
        pair.origins.update(tensor.origin.value for tensor in tensors if tensor.origin is not Origin.CONSTANT)
        if owns_parameters(target.get_submodule(path)):
            pair.aligns.update(_alignment(trees, tensor) for tensor in tensors)
    entries = [_entry(trees, key, pair, reduction_split) for key, pair in pairs.items()]
    order = {with_index(path)[0]: number for number, (path, _) in enumerate(target.named_modules())}
    entries.sort(key=lambda entry: order.get(with_index(entry.instances()[0][1][0])[0], 0))
    entries += _rotary(source, target)
    for side, module in (("source", source), ("target", target)):
        entries += _explained(module, side, {path for entry in entries for path in _paths(entry, side)})
    return ComponentMapping(tuple(entries))


def _candidates(target: nn.Module) -> list[str]:
    return [path for path, module in target.named_modules() if path and not is_wrapper(module)]


def _sources_of(trees: _Trees, path: str) -> tuple[str, ...]:
    """The source modules that hold what the target module was made of; nothing if there is no such module."""
    module = trees.target.get_submodule(path)
    tensors = {name for tensor in trees.tensors(path) for name in tensor.sources}
    if not tensors or not tensors <= trees.aliases.keys():
        return ()  # made of nothing, or of tensors that the source itself has no place for
    if owns_parameters(module) and not _has_weighted_children(module):
        holders = {_same_role(trees, name, module, path).rsplit(".", 1)[0] for name in tensors}
        return _in_tree_order(trees.source, holders)
    ancestor = _common_ancestor([name.rsplit(".", 1)[0] for name in tensors])
    if not ancestor:
        return ()
    unsolved = sum(tensor.origin is Origin.COMPUTED and not tensor.sources for tensor in trees.tensors(path))
    return (ancestor,) if len(trees.source_tensors(ancestor) ^ tensors) == unsolved else ()


def _has_weighted_children(module: nn.Module) -> bool:
    """A module with a bare parameter beside projections of its own is a composite, no fused projection."""
    return any(any(True for _ in child.parameters()) for child in module.children())


def _by_majority(trees: _Trees, found: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Composites of single layers that fit no source module: mapped as the same module of most other layers is."""
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for path, sources in found.items():
        (pattern, index), first = with_index(path), with_index(sources[0])
        if index and index == first[1] and len(sources) == 1:
            votes[pattern][first[0]] += 1
    chosen: dict[str, tuple[str, ...]] = {}
    for path in _candidates(trees.target):
        pattern, index = with_index(path)
        if path in found or pattern not in votes or owns_parameters(trees.target.get_submodule(path)):
            continue
        source = fill(votes[pattern].most_common(1)[0][0], index)
        if source in dict(trees.source.named_modules()):
            chosen[path] = (source,)
    return chosen


def _aliases(source: nn.Module) -> dict[str, tuple[str, ...]]:
    """Tensor name -> all names of the same parameter (tied weights)."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in (*source.named_parameters(remove_duplicate=False), *source.named_buffers()):
        names[id(tensor)].append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _same_role(trees: _Trees, tensor: str, module: nn.Module, path: str) -> str:
    """Of tied tensors the alias that plays the target module's part: an embedding for an embedding, else the head."""
    group = trees.aliases.get(tensor, (tensor,))
    embeds = "embed" in type(module).__name__.lower()

    def embedding(name: str) -> bool:
        return isinstance(trees.source.get_submodule(name.rsplit(".", 1)[0]), nn.Embedding)

    fitting = [name for name in group if embedding(name) == embeds]
    named = [name for name in fitting if name.split(".")[-2:-1] == path.split(".")[-1:]]
    return (named or fitting or [tensor])[0]


def _in_tree_order(source: nn.Module, paths: set[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in source.named_modules() if name in paths)


def _common_ancestor(paths: Sequence[str]) -> str:
    common = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _file(pairs: dict[tuple[tuple[str, ...], str], _Pair], sources: tuple[str, ...], target: str) -> _Pair:
    """The pair under its indexed name when both sides carry the same index; else under its plain name."""
    name, index = with_index(target)
    indexed = [with_index(path) for path in sources]
    if index and all(numbers == index for _, numbers in indexed):
        pair = pairs[(tuple(source for source, _ in indexed), name)]
        pair.indices.append(index)
        return pair
    return pairs[(sources, target)]


def _alignment(trees: _Trees, tensor: TensorProvenance) -> str:
    """How the source's channels stand in the target: replicated, or a part of them; nothing where they are the same."""
    if tensor.row_map is not None and len(tensor.sources) == 1:
        rows = [row for _, row in tensor.row_map]
        # a part alone: rows of a whole tensor in another order are a fault until the module around proves otherwise
        if len(set(rows)) == len(rows) < trees.height(tensor.sources[0]):
            return _part(rows)
    columns = tensor.column_map or ()
    if columns and len(set(columns)) == len(columns) < trees.width(tensor.sources[0]):
        return _part(columns)  # a transposed weight (Conv1D) has its output channels in columns
    return _replication(tensor)


def _part(rows: Sequence[int]) -> str:
    """`take:FIRST:WIDTH:STEP:COUNT,...` for these rows; nothing where they are too scattered to be written down."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((row, 1))
    blocks: list[list[int]] = []
    for first, width in runs:
        last = blocks[-1] if blocks else []
        step = (first - last[0]) // last[3] if last else 0
        if last and last[1] == width and step > 0 and first == last[0] + step * last[3] and last[2] in (step, 0):
            last[2], last[3] = step, last[3] + 1
        else:
            blocks.append([first, width, 0, 1])
    parts = [":".join(map(str, (first, width, step or width, count))) for first, width, step, count in blocks]
    return "take:" + ",".join(parts) if len(parts) <= _BLOCKS else ""


def _replication(tensor: TensorProvenance) -> str:
    """`repeat:R:D` when blocks of D source rows stand R times in a row; else nothing."""
    if tensor.origin is not Origin.ROWS or tensor.row_map is None:
        return ""
    rows = [row for _, row in tensor.row_map]
    height = max(rows) + 1
    if rows[0] != 0 or len(rows) % height:
        return ""
    times = len(rows) // height
    width = next((place for place, row in enumerate(rows) if row != place), height)
    if times < 2 or height % width:
        return ""
    expected = [block * width + row for block in range(height // width) for _ in range(times) for row in range(width)]
    return f"repeat:{times}:{width}" if rows == expected else ""


def _entry(trees: _Trees, key: tuple[tuple[str, ...], str], pair: _Pair, reduction_split: int | None) -> MappingEntry:
    first = fill(key[1], pair.indices[0]) if pair.indices else key[1]
    row_parallel = "RowParallel" in type(trees.target.get_submodule(first)).__name__
    return MappingEntry(
        key[0],
        (key[1],),
        "weight provenance: " + (", ".join(sorted(pair.origins)) or "as in the other layers"),
        tuple(pair.indices),
        reduction_split if row_parallel else None,
        align=next(iter(pair.aligns)) if len(pair.aligns) == 1 else "",
    )


def _paths(entry: MappingEntry, side: str) -> list[str]:
    return [path for source, target, _ in entry.instances() for path in (source if side == "source" else target)]


def _rotary(source: nn.Module, target: nn.Module) -> list[MappingEntry]:
    """Rotary tables map by kind: to the source's only module of them, or layer by layer where it has one in each.

    Of several others none can be told to be a target's counterpart: they are named as compared inside the attention.
    """
    sources, targets = _rotary_places(source), _rotary_places(target)
    if not sources:
        return []
    by_layer = [name for name, indices in sources.items() if all(indices)]
    only = next(iter(sources)) if len(sources) == 1 else ""
    entries, matched = [], set()
    for name, indices in targets.items():
        own = next((other for other in by_layer if sources[other] == indices), only)
        if (
            not own
            or (own != only and not all(indices))
            or (own == only and own in by_layer and sources[own] != indices)
        ):
            continue
        entries.append(
            MappingEntry((own,), (name,), "by kind: rotary tables", tuple(index for index in indices if index))
        )
        matched |= {("source", own), ("target", name)}
    why = "rotary tables, of which the source has several modules: compared inside the attention"
    for side, places in (("source", sources), ("target", targets)):
        for name, indices in places.items():
            if (side, name) not in matched:
                own_side, other = ((name,), ()) if side == "source" else ((), (name,))
                entries.append(MappingEntry(own_side, other, why, tuple(index for index in indices if index)))
    return entries


def _rotary_places(model: nn.Module) -> dict[str, list[_Index]]:
    """Pattern of the path of a rotary module -> its indices."""
    grouped: dict[str, list[_Index]] = defaultdict(list)
    for path, module in model.named_modules():
        if is_rotary(module):
            name, index = with_index(path)
            grouped[name].append(index)
    return grouped


def _explained(module: nn.Module, side: str, mapped: set[str]) -> list[MappingEntry]:
    """Entries for modules without counterpart that need none; what is left stays unmapped and is reported."""
    found: dict[tuple[str, str], list[_Index]] = defaultdict(list)
    for path, child in module.named_modules():
        if not path or path in mapped:
            continue
        name, index = with_index(path)
        reason = explanation(child)
        if not reason and is_container(child, path, mapped):
            reason = f"{type(child).__name__}: a container of mapped modules"
        if not reason and is_weightless_part(child, path, mapped):
            reason = f"{type(child).__name__}: has no weights; what it computes is seen in the module around it"
        if reason:
            found[(name, reason)].append(index)
    return [
        MappingEntry(
            (name,) if side == "source" else (),
            () if side == "source" else (name,),
            reason,
            tuple(index for index in indices if index),
        )
        for (name, reason), indices in found.items()
    ]
