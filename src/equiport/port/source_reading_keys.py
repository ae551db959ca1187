"""Config keys that the modeling source reads, by AST over the classes that the concrete model is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError
from equiport.port.source_reading_model import SourceModel, source_file

# a config travels under these names in modeling files
_CARRIERS = ("config", "text_config", "cfg", "encoder_config", "decoder_config")
# methods of a config object
_METHODS = {"to_dict", "get_text_config", "standardize_rope_params", "validate_rope", "get", "items", "update",
            "__class__", "from_dict", "to_diff_dict", "save_pretrained", "from_pretrained"}  # fmt: skip
# read by the library's own functions (masks, rotary tables, cache) on behalf of the model
_LIBRARY = {
    "create_causal_mask": (),
    "create_sliding_window_causal_mask": ("sliding_window",),
    "create_chunked_causal_mask": ("attention_chunk_size",),
    "ROPE_INIT_FUNCTIONS": ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "head_dim",
                            "max_position_embeddings"),
    "create_masks_for_generate": ("layer_types", "sliding_window"),
}  # fmt: skip


@dataclass(frozen=True)
class KeyRead:
    """A config attribute read by the source: where, and the default when it is read by getattr."""

    name: str
    classes: tuple[str, ...]  # classes or functions that read it, in the file's order


def keys_read(source: SourceModel) -> list[KeyRead]:
    """Config attributes that the concrete classes read, in alphabetical order.

    Only what the causal-LM class reaches counts: another head's keys in the same file do not.
    """
    readers: dict[str, list[str]] = {}
    for file, classes in _origins(source).items():
        tree = parse(file)
        reached = reachable(tree, *classes)
        for node in tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name not in reached:
                continue
            for name in (*_reads(node), *_library_reads(node)):
                readers.setdefault(name, [])
                if node.name not in readers[name]:
                    readers[name].append(node.name)
    known = set(_attributes(source.config)) | set(source.raw)
    return [KeyRead(name, tuple(readers[name])) for name in sorted(readers) if name in known]


def unread_keys(source: SourceModel, read: list[KeyRead]) -> list[str]:
    """Keys of config.json that nothing in the modeling source reads."""
    names = {key.name for key in read}
    names |= {source.renamed.get(name, name) for name in names}
    return sorted(key for key in source.raw if key not in names)


@lru_cache(maxsize=32)
def parse(file: Path) -> ast.Module:
    """The syntax tree of a source file.

    Raises:
        EquiportError: it is no Python.
    """
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        raise EquiportError(f"is no Python source: {error}", where=file, remedy="Restore the file.") from error


def reachable(tree: ast.Module, *start: str) -> set[str]:
    """Classes and functions of a file that those of `start` use, directly or through others."""
    bodies: dict[str, ast.AST] = {
        node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    # a module-level table (`ATTENTION_CLASSES = {...}`) leads to the classes in it
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bodies[node.targets[0].id] = node
    seen: set[str] = set()
    pending = list(start)
    while pending:
        name = pending.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        pending += [node.id for node in ast.walk(bodies[name]) if isinstance(node, ast.Name)]
    return seen


def _origins(source: SourceModel) -> dict[Path, list[str]]:
    """Model files and the classes of them that the model is made of, bases included: a subclass reads what they read.

    The library's own machinery (torch, base classes of transformers) is no model file.
    """
    types = {cls for module in source.skeleton.modules() for cls in type(module).__mro__}
    found: dict[Path, list[str]] = {source.file: [source.cls.__name__]}
    for cls in sorted(types, key=lambda one: (one.__module__, one.__name__)):
        module = cls.__module__
        if module.startswith("torch") or (
            module.startswith("transformers.") and not module.startswith("transformers.models.")
        ):
            continue
        if cls is not object:
            try:
                found.setdefault(source_file(cls), []).append(cls.__name__)
            except EquiportError:
                continue
    return found


def class_node(tree: ast.Module, name: str) -> ast.ClassDef | None:
    """The definition of a class in a file."""
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _reads(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load) and _is_config(inner.value):
            if inner.attr not in _METHODS and not inner.attr.startswith("__"):
                yield inner.attr
        elif (
            isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in ("getattr", "hasattr")
        ):
            yield from _asked(inner)


def _asked(call: ast.Call) -> Iterator[str]:
    if len(call.args) > 1 and _is_config(call.args[0]) and isinstance(call.args[1], ast.Constant):
        yield str(call.args[1].value)


def _library_reads(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield from _LIBRARY.get(inner.id, ())


def _is_config(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _CARRIERS
    return isinstance(node, ast.Attribute) and node.attr in _CARRIERS


def _attributes(config: Any) -> list[str]:
    names = list(config.to_dict()) + list(getattr(type(config), "attribute_map", {}) or {})
    names += [name for name in vars(config) if not name.startswith("_")]
    names += [name for name in dir(type(config)) if isinstance(getattr(type(config), name, None), property)]
    return names
