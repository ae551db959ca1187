"""component_mapping.json: pairs of source modules and target modules, with `{i}` for layer indices.

The file is a JSON array; an entry is `[source_modules, target_modules]` or `[source_modules, target_modules, notes]`,
where notes may hold `reasoning`, `indices`, `reduction_split`, `component_type`. An entry with one empty side explains
a module without counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.structure.tree import with_index

_BLOCKS = r"\d+:[1-9]\d*:[1-9]\d*:[1-9]\d*"
_ALIGN = re.compile(rf"repeat:[1-9]\d*:[1-9]\d*|take:{_BLOCKS}(,{_BLOCKS})*")
_NOTE_KEYS = {"reasoning", "indices", "reduction_split", "component_type", "align"}


@dataclass(frozen=True)
class MappingEntry:
    """A mapped pair (component), or an explained module where one side is empty.

    `indices`: for each instance the values of the placeholders; empty means one instance without placeholder.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    reasoning: str = ""
    indices: tuple[tuple[int, ...], ...] = ()
    reduction_split: int | None = None
    component_type: str = ""
    align: str = ""

    @property
    def is_component(self) -> bool:
        """Whether both sides are there, so that it can be tested."""
        return bool(self.source and self.target)

    @property
    def name(self) -> str:
        """The component's name: its target path(s) with placeholders."""
        return "+".join(self.target or self.source)

    def aligned(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """ref_fp32, ref_bf16, target[, target_fp32] with the declared alignment applied to the reference sides.

        `repeat:R:D`: each block of D channels stands R times in the target (kv heads replicated to query heads).
        `take:FIRST:WIDTH:STEP:COUNT,...`: the target has a part of the channels, COUNT blocks of WIDTH from FIRST on,
        one every STEP (a projection split off a fused one).
        """
        if not self.align:
            return tensors
        kind, _, text = self.align.partition(":")
        change = _repeated if kind == "repeat" else _taken
        return (change(tensors[0], text), change(tensors[1], text), *tensors[2:])

    def instances(self) -> list[tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]]:
        """(source paths, target paths, index) of each instance."""
        return [
            (tuple(fill(path, index) for path in self.source), tuple(fill(path, index) for path in self.target), index)
            for index in (self.indices or ((),))
        ]


def _repeated(tensor: Tensor, text: str) -> Tensor:
    times, width = text.split(":")
    blocks = tensor.reshape(*tensor.shape[:-1], -1, int(width))
    return blocks.repeat_interleave(int(times), dim=-2).reshape(*tensor.shape[:-1], -1)


def _taken(tensor: Tensor, text: str) -> Tensor:
    parts = (tuple(map(int, part.split(":"))) for part in text.split(","))
    channels = [
        channel
        for first, width, step, count in parts
        for start in range(first, first + step * count, step)
        for channel in range(start, start + width)
    ]
    return tensor[..., channels]


@dataclass(frozen=True)
class ComponentMapping:
    """All entries, in forward order."""

    entries: tuple[MappingEntry, ...]

    @property
    def components(self) -> tuple[MappingEntry, ...]:
        """Entries with both sides."""
        return tuple(entry for entry in self.entries if entry.is_component)

    @property
    def tested(self) -> tuple[MappingEntry, ...]:
        """What stage 2 compares: the components, the way into the layers, and from the head's input to logits."""
        ways = (self.entry_path, HEAD_PATH if self.head is not None else None)
        return self.components + tuple(way for way in ways if way is not None)

    @property
    def first_layer(self) -> tuple[str, str] | None:
        """Paths of the first decoder layer in the source and in the target, where one stands for one."""
        for entry in self.components:
            if entry.component_type == "decoder_layer" and len(entry.source) == len(entry.target) == 1:
                for source, target, index in entry.instances():
                    if index == (0,):
                        return source[0], target[0]
        return None

    @property
    def entry_path(self) -> MappingEntry | None:
        """The way from token ids to what the first decoder layer is given: embeddings, positions, scale, norm. Where
        they are computed is a port's own affair; its source is the layer's input (`input_of`)."""
        layer = self.first_layer
        if layer is None:
            return None
        said = "the whole path from token ids to the first decoder layer"
        return MappingEntry((input_of(layer[0]),), (ENTRY_NAME,), said, component_type=ENTRY_TYPE)

    @property
    def head(self) -> MappingEntry | None:
        """The output projection, where one source module stands for one target module."""
        found = [
            entry
            for entry in self.components
            if entry.component_type == "lm_head" and len(entry.source) == len(entry.target) == 1 and not entry.indices
        ]
        return found[0] if len(found) == 1 else None


ENTRY_NAME, ENTRY_TYPE = "embeddings", "entry_path"
_INPUT = "@input"


def input_of(path: str) -> str:
    """The name of the hidden input of the module at `path`, where names of modules stand for their outputs."""
    return path + _INPUT


def module_of(path: str) -> str:
    """The module whose output, or input, `path` names."""
    return path.removesuffix(_INPUT)


#: From the head's input to the logits that come out: what scales and caps them is in no module. Its source is the
#: whole model ("").
HEAD_PATH = MappingEntry(
    ("",), ("logits",), "the whole path from the head's input to the logits", component_type="head_path"
)


@dataclass(frozen=True)
class MappingProblem:
    """Something wrong with a mapping: which entry, what."""

    entry: str
    problem: str


@dataclass(frozen=True)
class MappingCheck:
    """Problems, and the modules that no entry maps or explains."""

    problems: tuple[MappingProblem, ...] = ()
    unmapped_source: tuple[str, ...] = ()
    unmapped_target: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def complete(self) -> bool:
        """Every path exists and every module is mapped or explained."""
        return not (self.problems or self.unmapped_source or self.unmapped_target)


def fill(path: str, index: Sequence[int]) -> str:
    """`layers.{i}.mlp`, (7,) -> `layers.7.mlp`."""
    for letter, value in zip("ijklm", index, strict=False):
        path = path.replace("{" + letter + "}", str(value))
    return path


def save_mapping(path: Path, mapping: ComponentMapping) -> Path:
    """Write the mapping in the array form."""
    return write_json(path, [_as_json(entry) for entry in mapping.entries])


def _as_json(entry: MappingEntry) -> list[Any]:
    notes: dict[str, Any] = {"reasoning": entry.reasoning}
    if entry.component_type:
        notes["component_type"] = entry.component_type
    if entry.indices:
        notes["indices"] = [list(index) if len(index) > 1 else index[0] for index in entry.indices]
    if entry.align:
        notes["align"] = entry.align
    if entry.reduction_split is not None:
        notes["reduction_split"] = entry.reduction_split
    return [list(entry.source), list(entry.target), notes]


def load_mapping(path: Path, source_paths: Sequence[str], target_paths: Sequence[str]) -> ComponentMapping:
    """Read a mapping; placeholders without `indices` are expanded over the target's tree.

    Raises:
        EquiportError: no JSON, not an array of pairs, or an unknown note (the entry is named).
    """
    raw = read_json(path, remedy="Correct it, or delete it to have it proposed again.")
    if not isinstance(raw, list) or not raw:
        raise EquiportError(
            "must be a non-empty JSON array of [source_modules, target_modules] pairs",
            where=path,
            remedy="Correct it, or delete it to have it proposed again.",
        )
    entries = [_parse(path, number, item) for number, item in enumerate(raw)]
    return ComponentMapping(tuple(_expand(entry, source_paths, target_paths) for entry in entries))


def _parse(path: Path, number: int, item: Any) -> MappingEntry:
    def bad(what: str) -> EquiportError:
        return EquiportError(what, where=path, field=f"entry {number}", remedy="Correct this entry.")

    if isinstance(item, dict) and {"source", "target"} <= set(item):
        item = [item["source"], item["target"], {k: v for k, v in item.items() if k not in ("source", "target")}]
    if not isinstance(item, list) or len(item) not in (2, 3):
        raise bad("is no [source_modules, target_modules] pair")
    sides = []
    for side in item[:2]:
        paths = [side] if isinstance(side, str) else side
        if not isinstance(paths, list) or not all(isinstance(one, str) for one in paths):
            raise bad("module lists must hold strings")
        sides.append(tuple(paths))
    if not sides[0] and not sides[1]:
        raise bad("names no module on either side")
    notes = item[2] if len(item) == 3 else {}
    notes = {"reasoning": notes} if isinstance(notes, str) else notes
    if not isinstance(notes, dict) or set(notes) - _NOTE_KEYS:
        unknown = sorted(set(notes) - _NOTE_KEYS) if isinstance(notes, dict) else notes
        raise bad(f"unknown notes {unknown}; known are {sorted(_NOTE_KEYS)}")
    split = notes.get("reduction_split")
    if split is not None and (isinstance(split, bool) or not isinstance(split, int) or split < 1):
        raise bad("reduction_split must be a positive integer")
    align = str(notes.get("align", ""))
    if align and not _ALIGN.fullmatch(align):
        raise bad(f"align {align!r} is unknown; known are repeat:TIMES:WIDTH and take:FIRST:WIDTH:STEP:COUNT,...")
    indices = _indices(notes.get("indices", []))
    if indices is None:
        raise bad("indices must be a list of layer numbers, or of lists of numbers")
    return MappingEntry(
        sides[0],
        sides[1],
        str(notes.get("reasoning", "")),
        indices,
        split,
        str(notes.get("component_type", "")),
        align,
    )


def _indices(raw: Any) -> tuple[tuple[int, ...], ...] | None:
    """[0, 1] or [[0, 3], [0, 4]] as tuples; None when it is anything else."""
    if not isinstance(raw, list):
        return None
    rows = [value if isinstance(value, list) else [value] for value in raw]
    if any(isinstance(number, bool) or not isinstance(number, int) for row in rows for number in row):
        return None
    return tuple(tuple(row) for row in rows)


def _expand(entry: MappingEntry, source_paths: Sequence[str], target_paths: Sequence[str]) -> MappingEntry:
    pattern = next((path for path in (*entry.target, *entry.source) if "{" in path), None)
    if entry.indices or pattern is None:
        return entry
    tree = target_paths if pattern in entry.target else source_paths
    regex = re.compile(re.sub(r"\\\{[i-m]\\\}", r"(\\d+)", re.escape(pattern)) + "$")
    found = sorted({tuple(int(number) for number in match.groups()) for path in tree if (match := regex.match(path))})
    return replace(entry, indices=tuple(found) or ((0,),))


def check_mapping(
    mapping: ComponentMapping,
    source_paths: Sequence[str],
    target_paths: Sequence[str],
) -> MappingCheck:
    """Every path named exists, and every module is mapped, explained, or inside one that is explained whole.

    A container of mapped modules explains itself alone: what else is in it must be named.
    """
    problems: list[MappingProblem] = []
    covered: dict[str, set[str]] = {"source": set(), "target": set()}
    explained: dict[str, set[str]] = {"source": set(), "target": set()}
    trees = {"source": set(source_paths), "target": set(target_paths)}
    for entry in mapping.entries:
        for source, target, _ in entry.instances():
            for side, paths in (("source", source), ("target", target)):
                unknown = [path for path in paths if path not in trees[side]]
                problems += [MappingProblem(entry.name, f"the {side} has no module {path!r}") for path in unknown]
                (covered if entry.is_component else explained)[side].update(paths)
    whole = {
        side: {one for one in paths if not any(path.startswith(one + ".") for path in covered[side])}
        for side, paths in explained.items()
    }
    left = {
        side: sorted(
            with_index(path)[0]
            for path in trees[side]
            if path not in covered[side]
            and path not in explained[side]
            and not any(path.startswith(one + ".") for one in whole[side])
        )
        for side in trees
    }
    unique = {side: tuple(dict.fromkeys(paths)) for side, paths in left.items()}
    deduplicated = tuple(dict.fromkeys(problems))
    return MappingCheck(deduplicated, unique["source"], unique["target"])
