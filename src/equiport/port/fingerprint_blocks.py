"""The inventory: every block of the source with its class, file and line."""

from __future__ import annotations

from torch import nn

from equiport.port.fingerprint import SourceBlock
from equiport.port.fingerprint_structure import Structure
from equiport.port.source_reading_model import SourceModel, numbered, place_of


def source_blocks(source: SourceModel, structure: Structure | None) -> tuple[SourceBlock, ...]:
    """One entry for each role and class; the path is the first place, with {i} for the layer."""
    blocks: dict[tuple[str, str, str], SourceBlock] = {}

    def add(role: str, path: str, module: nn.Module | None = None) -> None:
        module = source.skeleton.get_submodule(path) if module is None else module
        cls = type(module)
        shown = numbered(path)
        if (role, shown, cls.__name__) not in blocks:
            file, line = place_of(cls)
            blocks[(role, shown, cls.__name__)] = SourceBlock(role, shown, cls.__name__, file, line)

    add("causal_lm", "", source.skeleton)
    if structure is None:
        for name, child in source.skeleton.named_children():
            add("part", name, child)
        return tuple(blocks.values())
    names = structure.names
    if names.backbone:
        add("model", names.backbone)
    for role, path in (
        ("embedding", names.embedding), ("positions", names.positions), ("embedding_norm", names.embedding_norm),
        ("rotary", names.rotary),
    ):  # fmt: skip
        if path:
            add(role, path)
    for parts in structure.layers:
        add("layer", parts.path)
        for role, name in (
            ("attention", parts.attention), ("recurrent", parts.recurrent), ("moe" if parts.moe else "mlp", parts.mlp),
        ):  # fmt: skip
            if name:
                add(role, parts.at(name))
        for name in parts.inline_mlp:
            add("mlp", parts.at(name))
        for name in parts.norms:
            add("norm", parts.at(name))
        if parts.attention:
            inner = source.skeleton.get_submodule(parts.at(parts.attention))
            for name, child in inner.named_children():
                if "norm" in type(child).__name__.lower() or "norm" in name:
                    add("qk_norm", f"{parts.at(parts.attention)}.{name}", child)
    for role, path in (("final_norm", names.final_norm), ("lm_head", names.lm_head)):
        if path:
            add(role, path)
    return tuple(blocks.values())
