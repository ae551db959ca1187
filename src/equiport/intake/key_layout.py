"""Which names of stored tensors a port's conversion reads, by its text."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from equiport.reference.key_layout import KeyLayout, backbone_prefix
from equiport.reference.model import skeleton
from equiport.stacks.port_classes import PortClasses
from equiport.stacks.source_reading import SourceFile, read_source

_CONVERSION = "convert_hf_to_neuron_state_dict"
_STRIPPED, _USUAL_STRIPPED = "_STATE_DICT_MODEL_PREFIX", "model."


@dataclass(frozen=True)
class _Reads:
    """`stripped`: what the stack takes off before the conversion. `names`: whole names and beginnings of names that
    the conversion looks for. `demanded`: prefixes without which it skips a tensor.
    """

    stripped: str
    names: frozenset[str]
    demanded: tuple[str, ...]

    def hits(self, stored: Collection[str]) -> int:
        """How many of the names and beginnings occur among stored names."""
        given = {name.removeprefix(self.stripped) for name in stored}
        whole = self.names & given
        begun = {name for name in self.names - whole if name.endswith(".") and any(g.startswith(name) for g in given)}
        return len(whole) + len(begun)

    def takes(self, stored: Collection[str]) -> bool:
        """Whether some stored name has a prefix that is demanded, where one is."""
        given = [name.removeprefix(self.stripped) for name in stored]
        return not self.demanded or any(name.startswith(self.demanded) for name in given)


def layout_read(port: Path, classes: PortClasses, folder: Path) -> KeyLayout:
    """The layout of the model of `folder` (a config is enough) that the port's conversion reads.

    The plain one, unless nothing of it is looked for, and something of another.

    Raises:
        EquiportError: transformers cannot build the model.
    """
    reads = _reads(read_source(port), classes.causal)
    if reads is None:
        return KeyLayout()
    model = skeleton(folder)
    own, prefix = list(model.state_dict()), backbone_prefix(model)
    layouts = [KeyLayout(), *([KeyLayout(dropped=prefix)] if prefix else [])]
    if not any(reads.takes([layout.stored(name) for name in own]) for layout in layouts):
        wrapped = [KeyLayout(added=prefix) for prefix in reads.demanded if prefix.endswith(".")]
        return wrapped[0] if len(wrapped) == 1 else KeyLayout()
    # names outside the backbone are the same in both
    inside = [name for name in own if name.startswith(prefix)]
    hits = [reads.hits([layout.stored(name) for name in inside]) for layout in layouts]
    return layouts[1] if len(layouts) > 1 and not hits[0] and hits[1] else layouts[0]


def _reads(source: SourceFile, causal: str) -> _Reads | None:
    """None where the class has no conversion of its own."""
    owner = source.classes.get(causal)
    body = owner.body if owner else []
    found = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == _CONVERSION), None)
    if found is None:
        return None
    stripped = _USUAL_STRIPPED
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        if any(isinstance(target, ast.Name) and target.id == _STRIPPED for target in node.targets):
            stripped = str(node.value.value)
    return _Reads(stripped, frozenset(_looked_for(found)), tuple(_demanded(found)))


def _looked_for(function: ast.FunctionDef) -> Iterator[str]:
    """Texts, and beginnings of f-strings, that are no docstring and no name that a result is stored under."""
    aside = {id(child) for node in ast.walk(function) if _is_stored_under(node) for child in ast.walk(node)}
    for node in ast.walk(function):
        if id(node) in aside:
            continue
        if isinstance(node, ast.JoinedStr):
            aside |= {id(child) for child in ast.walk(node) if child is not node}
            node = node.values[0] if node.values else node
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip("."):
            yield node.value


def _is_stored_under(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    return stored or isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _demanded(function: ast.FunctionDef) -> Iterator[str]:
    """L of `if not key.startswith(L): ... continue`."""
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not isinstance(node.body[-1], ast.Continue):
            continue
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Call):
            call = test.operand
            named = isinstance(call.func, ast.Attribute) and call.func.attr == "startswith" and len(call.args) == 1
            first = call.args[0] if named else None
            for part in first.elts if isinstance(first, ast.Tuple) else [first]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
