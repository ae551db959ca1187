"""The three classes of a port (inner model, causal-LM wrapper, config), found by their bases, without an import."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from equiport.errors import EquiportError, OpenQuestionError
from equiport.stacks.source_reading import SourceFile, read_source


class Role(str, Enum):
    """What a class of a port is for; the value is the flag that names it."""

    INNER = "--inner-class"
    CAUSAL = "--causal-class"
    CONFIG = "--config-class"


@dataclass(frozen=True)
class PortClasses:
    """Class names of a port's modeling file (TARGET_INNER_CLASS, TARGET_CAUSAL_CLASS, TARGET_CONFIG_CLASS)."""

    modeling_file: Path
    inner: str
    causal: str
    config: str


_ROOTS = {"NeuronBaseModel": Role.INNER, "NeuronBaseForCausalLM": Role.CAUSAL, "InferenceConfig": Role.CONFIG}
_LIBRARY = "neuronx_distributed_inference.models"
# Classes of the stack's own model library, which ports subclass: NeuronLlamaModel, NeuronQwen2ForCausalLM ...
_LIBRARY_NAMES = (
    (re.compile(r"Neuron\w+ForCausalLM$"), Role.CAUSAL),
    (re.compile(r"Neuron\w+Model$"), Role.INNER),
    (re.compile(r"\w+InferenceConfig$"), Role.CONFIG),
)


def find_port_classes(
    modeling_file: str | Path,
    *,
    inner_class: str | None = None,
    causal_class: str | None = None,
    config_class: str | None = None,
) -> PortClasses:
    """The port's classes. Names that are given are checked to be there; the others are found.

    A class has the role of its base, also through other classes of the file or of sibling files it imports, or when the
    base is a model of the stack's own library. A causal class leads to its inner class (`_model_cls`) and config class
    (`get_config_cls`). An inner class that the file neither defines nor imports is the one of the library's causal
    class that the port derives from; a port without a config class of its own takes the stack's InferenceConfig.

    Raises:
        EquiportError: the file is unreadable, lacks a class that was named, or has no class for a role.
        OpenQuestionError: several classes fit a role; they are named, with the flag that settles it.
    """
    source = read_source(modeling_file)
    roles = class_roles(source)
    known = {*source.classes, *source.imports, _inner_of_library(source, roles, causal_class)}
    for given in (inner_class, causal_class, config_class):
        if given is not None and given not in known:
            there = ", ".join(source.classes) or "none"
            raise EquiportError(
                f"has no class {given!r}", where=source.path, remedy=f"Classes that it defines: {there}."
            )
    causal = causal_class or _only(source, roles, Role.CAUSAL)
    inner = inner_class or _attribute_class(source, causal) or _library_inner(source, roles, causal)
    config = config_class or _returned_class(source, causal, "get_config_cls") or _config(source, roles)
    return PortClasses(source.path, inner=inner, causal=causal, config=config)


def class_roles(source: SourceFile) -> dict[str, Role | None]:
    """Every class that the file defines, with its role; None for blocks and the like."""
    return {name: _role(source, name, frozenset()) for name in source.classes}


def _only(source: SourceFile, roles: dict[str, Role | None], role: Role) -> str:
    found = [name for name, its in roles.items() if its is role]
    if len(found) == 1:
        return found[0]
    base = next(name for name, its in _ROOTS.items() if its is role)
    if not found:
        raise EquiportError(
            f"no class derives from {base}", where=source.path, remedy=f"Name the class with {role.value}."
        )
    raise OpenQuestionError(
        f"several classes derive from {base}: {', '.join(found)}",
        where=source.path,
        remedy=f"Say which one to take with {role.value}.",
    )


def _library_inner(source: SourceFile, roles: dict[str, Role | None], causal: str) -> str:
    """The inner class of the file; without one, that of the library's causal class.

    Raises:
        EquiportError, OpenQuestionError: as `find_port_classes`.
    """
    return _inner_of_library(source, roles, causal) or _only(source, roles, Role.INNER)


def _inner_of_library(source: SourceFile, roles: dict[str, Role | None], causal: str | None) -> str | None:
    """NeuronXModel where the port's causal class derives from the library's NeuronXForCausalLM and the file defines no
    inner class."""
    if causal in source.classes and Role.INNER not in roles.values():
        for base in source.classes[causal].bases:
            imported = source.imports.get(base.id) if isinstance(base, ast.Name) else None
            named = re.fullmatch(r"(Neuron\w+)ForCausalLM", imported.original) if imported else None
            if imported and named and imported.module.startswith(_LIBRARY):
                return f"{named[1]}Model"
    return None


def _config(source: SourceFile, roles: dict[str, Role | None]) -> str:
    """The config class of the file; without one, the stack's InferenceConfig where the file imports it."""
    if Role.CONFIG not in roles.values() and "InferenceConfig" in source.imports:
        return "InferenceConfig"
    return _only(source, roles, Role.CONFIG)


def _role(source: SourceFile, name: str, seen: frozenset[tuple[Path, str]]) -> Role | None:
    """The role of the class `name` as seen from `source`: defined there, imported from a sibling, or of the library."""
    if (source.path, name) in seen:
        return None
    seen = seen | {(source.path, name)}
    if name in source.classes:
        for base in source.classes[name].bases:
            role = _base_role(source, base, seen)
            if role is not None:
                return role
        return None
    imported = source.imports.get(name)
    if imported is None:
        return None
    original = imported.original or name
    if imported.level == 0 and imported.module.partition(".")[0].startswith("neuronx_distributed"):
        return _library_role(imported.module, original)
    sibling = source.sibling(imported.module, imported.level)
    return _role(read_source(sibling), original, seen) if sibling is not None else None


def _base_role(source: SourceFile, base: ast.expr, seen: frozenset[tuple[Path, str]]) -> Role | None:
    if isinstance(base, ast.Subscript):
        base = base.value
    if isinstance(base, ast.Name):
        return _role(source, base.id, seen)
    if isinstance(base, ast.Attribute):
        # A dotted base such as model_base.NeuronBaseModel: its last name says what it is.
        return _ROOTS.get(base.attr) or _library_role(_LIBRARY, base.attr)
    return None


def _library_role(module: str, name: str) -> Role | None:
    if name in _ROOTS:
        return _ROOTS[name]
    if not module.startswith(_LIBRARY):
        return None
    return next((role for pattern, role in _LIBRARY_NAMES if pattern.match(name)), None)


def _body(source: SourceFile, causal: str) -> list[ast.stmt]:
    """Statements of the causal class and of its bases in the same file, nearest first."""
    statements: list[ast.stmt] = []
    waiting, seen = [causal], set()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in source.classes:
            continue
        seen.add(name)
        statements += source.classes[name].body
        waiting += [base.id for base in source.classes[name].bases if isinstance(base, ast.Name)]
    return statements


def _attribute_class(source: SourceFile, causal: str) -> str | None:
    for statement in _body(source, causal):
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(target, ast.Name) and target.id == "_model_cls" for target in targets):
            return statement.value.id if isinstance(statement.value, ast.Name) else None
    return None


def _returned_class(source: SourceFile, causal: str, method: str) -> str | None:
    for statement in _body(source, causal):
        if isinstance(statement, ast.FunctionDef) and statement.name == method:
            returned = [node.value for node in ast.walk(statement) if isinstance(node, ast.Return)]
            names = {value.id for value in returned if isinstance(value, ast.Name)}
            one = names.pop() if len(names) == 1 and len(returned) == 1 else None
            return one if one in source.classes or one in source.imports else None
    return None
