"""Module trees: compressed (equal siblings folded), full, pretty and flat, as stage 0 writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from equiport.experiment.atomic import read_json, write_json, write_text


@dataclass(frozen=True)
class ModuleNode:
    """A module: its name in the parent, class, own parameters (name -> shape) and children."""

    name: str
    cls: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    children: tuple[ModuleNode, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two siblings must share to be folded: everything but their own name."""
        return (self.cls, self.parameters, tuple((child.name, child.signature) for child in self.children))


def build_tree(module: nn.Module, name: str = "") -> ModuleNode:
    """The tree of `module`; parameters and persistent buffers only show by shape, so meta tensors are fine."""
    parameters = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
    children = tuple(build_tree(child, key) for key, child in module.named_children())
    return ModuleNode(name, type(module).__name__, parameters, children)


def compress(node: ModuleNode) -> ModuleNode:
    """Fold runs of numbered siblings with the same signature into one node named `[first-last]`."""
    folded: list[ModuleNode] = []
    run: list[ModuleNode] = []
    for child in [*node.children, None]:
        if run and (child is None or not child.name.isdigit() or child.signature != run[0].signature):
            folded.append(_fold(run))
            run = []
        if child is None:
            break
        if child.name.isdigit():
            run.append(child)
        else:
            folded.append(compress(child))
    return ModuleNode(node.name, node.cls, node.parameters, tuple(folded))


def _fold(run: list[ModuleNode]) -> ModuleNode:
    inner = compress(run[0])
    name = run[0].name if len(run) == 1 else f"[{run[0].name}-{run[-1].name}]"
    return ModuleNode(name, inner.cls, inner.parameters, inner.children)


def as_json(node: ModuleNode) -> dict[str, Any]:
    """The tree as JSON values."""
    value: dict[str, Any] = {"name": node.name, "class": node.cls}
    if node.parameters:
        value["parameters"] = {name: list(shape) for name, shape in node.parameters}
    if node.children:
        value["children"] = [as_json(child) for child in node.children]
    return value


def pretty(node: ModuleNode) -> str:
    """ASCII drawing, one module a line."""
    lines = [f"{node.name or '(root)'}: {node.cls}"]
    _draw(node, "", lines)
    return "\n".join(lines) + "\n"


def _draw(node: ModuleNode, indent: str, lines: list[str]) -> None:
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in child.parameters)
        lines.append(f"{indent}{'`-- ' if last else '|-- '}{child.name}: {child.cls}{f' ({shapes})' if shapes else ''}")
        _draw(child, indent + ("    " if last else "|   "), lines)


def flat_paths(node: ModuleNode, prefix: str = "") -> Iterator[str]:
    """Dotted paths of every module below the root, parents first."""
    for child in node.children:
        path = f"{prefix}.{child.name}" if prefix else child.name
        yield path
        yield from flat_paths(child, path)


def write_trees(folder: Path, side: str, node: ModuleNode) -> list[Path]:
    """Write the four files of seed 003 for `side` (source or target)."""
    return [
        write_json(folder / f"model_tree_{side}.json", as_json(compress(node))),
        write_json(folder / f"model_tree_{side}_full.json", as_json(node)),
        write_text(folder / f"model_tree_{side}_pretty.txt", pretty(compress(node))),
        write_text(folder / f"model_tree_{side}_flat_paths.txt", "\n".join(flat_paths(node)) + "\n"),
    ]


def read_classes(folder: Path, side: str) -> dict[str, str]:
    """Dotted path of every module -> its class name, from the trees that `write_trees` left; empty where none are."""
    file = folder / f"model_tree_{side}_full.json"
    found: dict[str, str] = {}

    def walk(node: dict[str, Any], prefix: str) -> None:
        for child in node.get("children", []):
            path = f"{prefix}.{child['name']}" if prefix else child["name"]
            found[path] = child["class"]
            walk(child, path)

    if file.is_file():
        walk(read_json(file), "")
    return found


def with_index(path: str) -> tuple[str, tuple[int, ...]]:
    """`layers.7.mlp` -> (`layers.{i}.mlp`, (7,)); further numbers become {j}, {k}."""
    numbers: list[int] = []

    def replace(match: re.Match[str]) -> str:
        numbers.append(int(match.group(0)))
        return "{" + "ijklm"[min(len(numbers) - 1, 4)] + "}"

    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", replace, path), tuple(numbers)
