"""Branches that know the test's shapes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import ParsedModule, literal

_WEIGHTS = ("weight", "scale", "bias", "proj", "table", "cache", "kernel")


def check(module: ParsedModule) -> Iterator[Hit]:
    """Comparisons of an input's rows, length or whole shape with numbers, in what the port computes."""
    if module.role is not Role.PORT:
        return
    for function in compute_functions(module):
        for node in ast.walk(function):
            test = node.test if isinstance(node, (ast.If, ast.IfExp)) else None
            for item in ast.walk(test) if test is not None else ():
                if isinstance(item, ast.Compare) and len(item.ops) == 1 and _knows(module, item):
                    yield Hit(node, f"branches on {ast.unparse(item)[:60]}: one input's shape gets its own result")


def _knows(module: ParsedModule, node: ast.Compare) -> bool:
    if not isinstance(node.ops[0], (ast.Eq, ast.NotEq, ast.In, ast.NotIn)):
        return False
    for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
        kind = _shape(module, one)
        if kind == "whole" and _numbers(other) >= 2:
            return True
        number = literal(other)
        if kind == "size" and isinstance(number, int) and not isinstance(number, bool) and number > 1:
            return True
        if kind == "size" and isinstance(node.ops[0], (ast.In, ast.NotIn)) and one is node.left and _numbers(other):
            return True
    return False


def _shape(module: ParsedModule, node: ast.expr) -> str:
    """ "whole": a shape; "size": rows or length of an input; else empty. Widths are the model's own."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("tuple", "list") and node.args:
        return _shape(module, node.args[0])
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return "whole" if _is_input(node.value) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        if not _is_input(node.func.value):
            return ""
        place = literal(node.args[0]) if node.args else None
        return "whole" if not node.args else "size" if place in (0, 1) else ""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return "size" if literal(node.slice) in (0, 1) and _is_input(node.value.value) else ""
    return ""


def _is_input(node: ast.expr) -> bool:
    """A name that is no weight: tiles of those have the sizes of the hardware."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return bool(name) and not any(part in name.lower() for part in _WEIGHTS)


def _numbers(node: ast.expr) -> int:
    if isinstance(node, ast.Call) and node.args:
        return _numbers(node.args[0])
    if not isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return 0
    return sum(isinstance(literal(item), int) for item in ast.walk(node))


RULE = Rule(
    id="shape-branch",
    severity=Severity.ERROR,
    title="the port branches on the test's shapes",
    why="What is computed for one batch or length alone is right where it was tested and nowhere else.",
    remedy="Compute the same for every shape; 1 in decode is the one length that may be told apart.",
    check=check,
    bad=(
        in_forward("        if x.shape == (2, 24, 64):\n            return x\n        return -x\n"),
        in_forward("        return x if x.shape[1] == 24 else -x\n"),
        in_forward(
            "        if tuple(x.size()) in ([2, 24, 64], [2, 1, 64]):\n            return x\n        return x\n"
        ),
        in_forward("        if x.size(0) in (2, 3):\n            return x\n        return -x\n"),
    ),
    good=(
        in_forward("        if x.shape[1] == 1:\n            return x\n        return x + 1\n"),
        in_forward("        if x.shape[-1] != self.width:\n            raise ValueError\n        return x\n"),
        in_forward("        if x.dim() == 3 and x.shape[0] > 1:\n            return x\n        return x\n"),
    ),
)
