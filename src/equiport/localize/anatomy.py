"""What the modules of a source model are: attention, MLP, norm, decoder layer, router, rotary tables, embedding."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from torch import nn

from equiport.structure.roles import is_rotary


class Part(str, Enum):
    """The part a source module plays."""

    LINEAR = "linear"
    NORM = "norm"
    EMBEDDING = "embedding"
    ROTARY = "rotary"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    ROUTER = "router"
    MOE = "moe"
    LAYER = "layer"
    OTHER = "other"


def part_of(module: nn.Module) -> Part:
    """The part by class and children, not by path."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.Linear):
        return Part.LINEAR
    if isinstance(module, nn.Embedding):
        return Part.EMBEDDING
    if is_rotary(module):
        return Part.ROTARY
    if "norm" in name:
        return Part.NORM
    children = [part_of(child) for child in module.children()]
    if Part.ATTENTION in children:
        return Part.LAYER
    if "attention" in name or "attn" in name:
        return Part.ATTENTION
    if "router" in name or "gate" in name:
        return Part.ROUTER
    if "experts" in name:
        return Part.EXPERTS
    if Part.EXPERTS in children or Part.ROUTER in children:
        return Part.MOE
    if "mlp" in name or "feedforward" in name:
        return Part.MLP
    return Part.OTHER


def parts_within(root: nn.Module, part: Part) -> Iterator[tuple[str, nn.Module]]:
    """(relative path, module) of every module of this part, `root` itself first."""
    for path, module in root.named_modules():
        if part_of(module) is part:
            yield path, module


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The model's modules that make rotary tables."""
    return [module for module in model.modules() if is_rotary(module)]
