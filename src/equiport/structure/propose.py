"""Propose the component mapping from weight provenance, module trees and the list of expected differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from equiport.structure.mapping import ComponentMapping, MappingEntry
from equiport.structure.provenance import Origin, Provenance, TensorProvenance
from equiport.structure.tree import with_index

# framework scaffolding without a counterpart in the source, by class name (seed 003: expected structural differences)
_FRAMEWORK = {
    "SPMDRank": "the stack's own rank tensor",
    "KVCacheManager": "the stack's own KV cache",
    "DataParallelKVCacheManager": "the stack's own KV cache",
    "ModuleList": "a container",
    "ParameterList": "a container",
    "Sampler": "on-device sampling",
    "ModuleMarkerStartWrapper": "a compiler marker",
    "ModuleMarkerEndWrapper": "a compiler marker",
    "Softmax": "the stack's softmax, inside the attention core",
}
_ACTIVATIONS = ("silu", "gelu", "relu", "activation", "swish", "tanh", "xielu")
_GROUPS = ("GroupQueryAttention_QKV", "GroupQueryAttention_O")


@dataclass
class _Pairs:
    """Instances of one component while they are collected: index -> nothing, in tree order."""

    indices: list[tuple[int, ...]] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)
    aligns: set[str] = field(default_factory=set)


def propose_mapping(
    source: nn.Module, target: nn.Module, provenance: Provenance, *, reduction_split: int | None = None
) -> ComponentMapping:
    """Map every module of both trees, or explain why it has no counterpart.

    A target module with weights maps to the source modules that its weights came from; a module without weights of
    its own maps to the nearest common ancestor of what its children map to; rotary modules map by kind.
    """
    owners, aliases = _owners(target, provenance), _aliases(source)
    pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], _Pairs] = defaultdict(_Pairs)
    for path, module in target.named_modules():
        if path and owners.get(path) and not _is_wrapper(module):
            own = _same_role(owners[path], module, path, aliases, source)
            sources = _source_modules(source, own, is_leaf=_has_own_parameters(module))
            if sources:
                tensors = [tensor for tensor in provenance.tensors if _under(tensor.target, path)]
                value = _collect(pairs, sources, (path,))
                value.origins.update(tensor.origin.value for tensor in tensors)
                if _has_own_parameters(module):
                    value.aligns.update(_replication(tensor) for tensor in tensors)
    entries = [_entry(key, value, reduction_split) for key, value in pairs.items()]
    entries += _rotary(source, target)
    entries += _explained(source, "source", {path for entry in entries for path in _paths(entry, "source")})
    entries += _explained(target, "target", {path for entry in entries for path in _paths(entry, "target")})
    return ComponentMapping(tuple(entries))


def component_type(target: nn.Module, entry: MappingEntry) -> str:
    """The kind that thresholds and reports group by: norm, embedding, linear, rotary, mlp, attention, lm_head, layer."""
    name = entry.target[0].split(".")[-1].lower()
    path = entry.instances()[0][1][0]
    cls = type(dict(target.named_modules()).get(path, nn.Identity())).__name__.lower()
    for kind, marks in (
        ("lm_head", ("lm_head",)),
        ("rotary", ("rotary", "rope")),
        ("norm", ("norm",)),
        ("embedding", ("embed",)),
        ("attention_o", ("groupqueryattention_o", "o_proj")),
        ("attention_qkv", ("groupqueryattention_qkv", "qkv", "q_proj", "k_proj", "v_proj")),
        ("linear", ("linear", "_proj")),
        ("mlp", ("mlp",)),
        ("attention", ("attn", "attention")),
        ("decoder_layer", ("layer", "block")),
    ):
        if any(mark in name or mark in cls for mark in marks):
            return kind
    return "decoder_layer" if name == "{i}" else "module"


def in_framework(target: nn.Module, tensor: str) -> bool:
    """Whether a parameter belongs to the stack's own scaffolding (ranks, KV cache), whose values are not weights."""
    parts = tensor.split(".")[:-1]
    owners = [target.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
    return any(type(owner).__name__ in _FRAMEWORK and _has_own_parameters(owner) for owner in owners)


def _owners(target: nn.Module, provenance: Provenance) -> dict[str, set[str]]:
    """Target module path -> source tensors that its parameters (descendants' included) were made of."""
    owners: dict[str, set[str]] = defaultdict(set)
    for tensor in provenance.tensors:
        parts = tensor.target.split(".")[:-1]
        for depth in range(1, len(parts) + 1):
            owners[".".join(parts[:depth])].update(tensor.sources)
    return owners


def _aliases(source: nn.Module) -> dict[str, tuple[str, ...]]:
    """Tensor name -> all names of the same parameter (tied weights)."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in source.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _same_role(
    tensors: set[str], module: nn.Module, path: str, aliases: dict[str, tuple[str, ...]], source: nn.Module
) -> set[str]:
    """Of tied tensors take the alias that plays the target module's part: lm_head for a head, else an embedding."""
    if not _has_own_parameters(module):
        return tensors
    chosen = set()
    for tensor in tensors:
        group = aliases.get(tensor, (tensor,))
        embeds = "embed" in type(module).__name__.lower()
        fitting = [name for name in group if _is_embedding(source, name) == embeds]
        named = [name for name in fitting if name.split(".")[-2:-1] == path.split(".")[-1:]]
        chosen.add((named or fitting or [tensor])[0])
    return chosen


def _is_embedding(source: nn.Module, tensor: str) -> bool:
    return isinstance(source.get_submodule(tensor.rsplit(".", 1)[0]), nn.Embedding)


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__name__ in (*_GROUPS, *_FRAMEWORK) and not _has_own_parameters(module)


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _under(tensor: str, path: str) -> bool:
    return tensor.startswith(path + ".")


def _source_modules(source: nn.Module, tensors: set[str], *, is_leaf: bool) -> tuple[str, ...]:
    """The source modules that hold exactly these tensors: one module, or a group of siblings for a fused one."""
    modules = dict(source.named_modules())
    holders = sorted({tensor.rsplit(".", 1)[0] for tensor in tensors if tensor.rsplit(".", 1)[0] in modules})
    if not holders:
        return ()
    if is_leaf or len(holders) == 1:
        return _in_tree_order(holders, modules)
    ancestor = _common_ancestor(holders)
    if ancestor and _tensors_under(source, ancestor) == tensors:
        return (ancestor,)
    # a group such as q, k and v under one wrapper
    same_parent = len({holder.rsplit(".", 1)[0] for holder in holders}) == 1
    return _in_tree_order(holders, modules) if same_parent and len(holders) <= 4 else ()


def _in_tree_order(paths: Sequence[str], modules: dict[str, nn.Module]) -> tuple[str, ...]:
    order = {name: index for index, name in enumerate(modules)}
    return tuple(sorted(paths, key=lambda path: order[path]))


def _tensors_under(source: nn.Module, path: str) -> set[str]:
    return {name for name, _ in source.named_parameters() if _under(name, path)}


def _common_ancestor(paths: Sequence[str]) -> str:
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _collect(
    pairs: dict[tuple[tuple[str, ...], tuple[str, ...]], _Pairs],
    sources: tuple[str, ...],
    targets: tuple[str, ...],
) -> _Pairs:
    """File the pair under its indexed name when both sides carry the same index; else under its plain name."""
    indexed_target, index = with_index(targets[0])
    indexed_sources = [with_index(path) for path in sources]
    if index and all(numbers == index for _, numbers in indexed_sources):
        key = (tuple(name for name, _ in indexed_sources), (indexed_target,))
        pairs[key].indices.append(index)
    else:
        key = (sources, targets)
    return pairs[key]


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


def _entry(key: tuple[tuple[str, ...], tuple[str, ...]], value: _Pairs, reduction_split: int | None) -> MappingEntry:
    origins = ", ".join(sorted(value.origins - {Origin.CONSTANT.value})) or "structure"
    return MappingEntry(key[0], key[1], f"weight provenance: {origins}", tuple(value.indices), reduction_split)


def _paths(entry: MappingEntry, side: str) -> list[str]:
    return [path for source, target, _ in entry.instances() for path in (source if side == "source" else target)]


def _is_rotary(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "rotary" in name or "rope" in name


def _rotary(source: nn.Module, target: nn.Module) -> list[MappingEntry]:
    sources = [path for path, module in source.named_modules() if _is_rotary(module)]
    targets = [path for path, module in target.named_modules() if _is_rotary(module)]
    if not sources or not targets:
        return []
    grouped: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for path in targets:
        name, index = with_index(path)
        grouped[name].append(index)
    return [
        MappingEntry((sources[0],), (name,), "by kind: rotary tables", tuple(i for i in indices if i))
        for name, indices in grouped.items()
        if len(sources) == 1
    ]


def _explained(module: nn.Module, side: str, mapped: set[str]) -> list[MappingEntry]:
    """Entries for modules without counterpart that need none; what is left stays unmapped and is reported."""
    found: dict[tuple[str, str], list[tuple[int, ...]]] = defaultdict(list)
    for path, child in module.named_modules():
        if not path or path in mapped:
            continue
        name, index = with_index(path)
        reason = _reason(module, path, child, mapped)
        if reason:
            found[(name, reason)].append(index)
    entries = []
    for (name, reason), indices in found.items():
        numbers = tuple(index for index in indices if index)
        sides = ((name,), ()) if side == "source" else ((), (name,))
        entries.append(MappingEntry(sides[0], sides[1], reason, numbers))
    return entries


def _reason(root: nn.Module, path: str, module: nn.Module, mapped: set[str]) -> str:
    cls = type(module).__name__
    if cls in _FRAMEWORK:
        return f"{cls}: {_FRAMEWORK[cls]}"
    if any(mark in cls.lower() for mark in _ACTIVATIONS):
        return f"{cls}: an activation without weights, tested inside its parent"
    if cls in _GROUPS:
        return f"{cls}: the stack's wrapper; its projections are mapped one by one"
    inside = [child for child, _ in root.named_modules() if child.startswith(path + ".")]
    if inside and all(child in mapped or _is_plain(root, child) for child in inside):
        return f"{cls}: a container of mapped modules"
    return ""


def _is_plain(root: nn.Module, path: str) -> bool:
    cls = type(dict(root.named_modules())[path]).__name__
    return cls in _FRAMEWORK or cls in _GROUPS or any(mark in cls.lower() for mark in _ACTIVATIONS)
