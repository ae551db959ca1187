"""Facets that a source's text gives away, by AST. Each reading is True, False, or None where the text does not say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from equiport.port.source_reading_keys import class_node, parse, reachable
from equiport.port.source_reading_model import SourceModel

_ROUTERS = ("rout", "gate", "moe", "expert", "topk")


@dataclass(frozen=True)
class TextFacets:
    """What the text says, as evidence beside what was measured."""

    interleaved: bool | None
    softcapped_scores: bool | None
    router: str  # softmax_topk, topk_softmax, sigmoid, sparsemixer, unknown
    renormalised: bool | None


def read_text(source: SourceModel) -> TextFacets:
    """Facets of the classes and functions that the concrete class reaches.

    Raises:
        EquiportError: the file is no Python.
    """
    tree = parse(source.file)
    reached = reachable(tree, source.cls.__name__)
    nodes = [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in reached
    ]
    return TextFacets(
        _interleaved([node for node in nodes if isinstance(node, ast.FunctionDef)]),
        _has_softcap(nodes),
        *_router(nodes),
    )


def norm_offset(source: SourceModel, cls: str) -> bool | None:
    """Whether a norm class of the source multiplies by (1 + weight); None when the class stands elsewhere."""
    node = class_node(parse(source.file), cls)
    if node is None:
        return None
    forward = list(_methods(node, ("forward", "_norm")))
    if not forward:
        return None
    for inner in (inner for method in forward for inner in ast.walk(method)):
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add):
            sides = (inner.left, inner.right)
            if any(_is_one(side) for side in sides) and any("weight" in ast.unparse(side) for side in sides):
                return True
    return False


def norm_centres(source: SourceModel, cls: str) -> bool | None:
    """Whether a norm class subtracts the mean (LayerNorm), from its text; None when it does not say."""
    node = class_node(parse(source.file), cls)
    if node is None:
        return None
    text = "\n".join(ast.unparse(method) for method in _methods(node, ("forward", "_norm")))
    if "layer_norm(" in text or "- mean" in text or ".var(" in text:
        return True
    if "rms_norm(" in text or "pow(2)" in text or "square" in text:
        return False
    return None


def _methods(node: ast.ClassDef, names: tuple[str, ...]) -> Iterator[ast.FunctionDef]:
    return (inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name in names)


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in (1, 1.0)


def _interleaved(functions: list[ast.FunctionDef]) -> bool | None:
    pairs = halves = False
    for function in functions:
        if "rot" not in function.name:
            continue
        text = ast.unparse(function)
        strided = any(
            isinstance(inner, ast.Slice) and isinstance(inner.step, ast.Constant) and inner.step.value == 2
            for inner in ast.walk(function)
        )
        pairs |= strided or "view_as_complex" in text
        halves |= not strided and ("// 2" in text or "chunk(2" in text)
    return None if pairs == halves else pairs


def _has_softcap(nodes: list[ast.FunctionDef | ast.ClassDef]) -> bool | None:
    names = [node for node in nodes if "attention" in node.name.lower()]
    if not names:
        return None
    return any("tanh(" in ast.unparse(node) for node in names)


def _router(nodes: list[ast.FunctionDef | ast.ClassDef]) -> tuple[str, bool | None]:
    texts = [ast.unparse(node) for node in nodes if any(word in node.name.lower() for word in _ROUTERS)]
    texts = [text for text in texts if "topk(" in text] or [text for text in texts if "sparsemixer" in text]
    text = "\n".join(texts)
    if not text:
        return "unknown", None
    if "sparsemixer" in text:
        return "sparsemixer", None
    renormalised = "norm_topk_prob" in text or ".sum(" in text
    if "sigmoid(" in text and ("softmax(" not in text or "shared" not in text):
        return "sigmoid", renormalised
    softmax, topk = text.find("softmax("), text.find("topk(")
    if softmax < 0:
        return ("sigmoid" if "sigmoid(" in text else "unknown"), renormalised
    return ("softmax_topk" if softmax < topk else "topk_softmax"), renormalised
