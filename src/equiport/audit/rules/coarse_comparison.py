"""Comparisons of what is left after most of it was thrown away."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import comparisons
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, literal

_COARSE = {
    "round": "rounded", "int": "cut to integers", "long": "cut to integers", "sign": "its signs", "bool": "its truth",
    "floor": "rounded", "ceil": "rounded", "trunc": "rounded",
    "histc": "a histogram", "unique": "its distinct values",
}  # fmt: skip
_REDUCED = frozenset({"mean", "sum", "norm", "std", "var", "median", "max", "min", "amax", "amin"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Sides that are rounded, sorted, or made one number each before they are compared."""
    if module.role is not Role.TEST:
        return
    for found in comparisons(module):
        if found.kind not in ("tensors", "asserting", "predicate") or len(found.sides) < 2:
            continue
        said = [_coarse(module, side, 0) for side in found.sides]
        if all(said):
            yield Hit(found.call, f"what is compared is {said[0]}")
    for node in module.nodes:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _decides(module, node)):
            continue
        if _reduced(module, node.left) and _reduced(module, node.right):
            yield Hit(node, "each side is made one number before the difference is taken")


def _coarse(module: ParsedModule, node: ast.expr, depth: int) -> str:
    if depth > 8:
        return ""
    if isinstance(node, ast.Name):
        bound = module.flow.scopes.last(node)
        return _coarse(module, bound, depth + 1) if bound is not None else ""
    if isinstance(node, ast.Subscript):
        return _coarse(module, node.value, depth + 1)
    if not isinstance(node, ast.Call):
        return ""
    named = next((name for name in module.dotted(node.func) if name.startswith("torch.")), "")
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = named.rpartition(".")[2] or method
    inner = node.args[0] if named and node.args else node.func.value if isinstance(node.func, ast.Attribute) else None
    whole = not any(item.arg in ("dim", "axis") for item in node.keywords) and len(node.args) <= (1 if named else 0)
    if name in _REDUCED and whole:
        return "one number of each side"
    if _COARSE.get(name):
        return _COARSE[name]
    return _coarse(module, inner, depth + 1) if inner is not None and name != "abs" else ""


def _reduced(module: ParsedModule, node: ast.expr) -> bool:
    """`a.mean()`, `a.sum().item()`, `torch.norm(a)` of one side."""
    if isinstance(node, ast.Name):
        bound = module.flow.scopes.last(node)
        return bound is not None and not isinstance(bound, ast.Name) and _reduced(module, bound)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("item", "float", "cpu", "detach"):
            return _reduced(module, node.func.value)
        named = any(name.startswith("torch.") for name in module.dotted(node.func))
        whole = len(node.args) <= (1 if named else 0) and not node.keywords
        inner = node.args[0] if named and node.args else node.func.value
        # a reduced difference is a comparison; a reduced side is none
        differs = any(isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub) for item in ast.walk(inner))
        return node.func.attr in _REDUCED and whole and not differs and not _measured(module, inner)
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "float" and bool(node.args) and _reduced(
        module, node.args[0]
    )  # fmt: skip


def _measured(module: ParsedModule, node: ast.expr) -> bool:
    """Whether a value is itself a difference, by name."""
    return isinstance(node, ast.Name) and any(
        isinstance(item, ast.BinOp) for value in module.flow.scopes.bindings(node) for item in ast.walk(value)
    )


def _decides(module: ParsedModule, node: ast.BinOp) -> bool:
    """In an assert that both sides of the test reach."""
    asserted = any(isinstance(outer, ast.Assert) for outer in module.around(node)) or any(
        isinstance(outer, ast.Assign) for outer in module.around(node)
    )
    return asserted and PORT in module.flow.origins(node) and literal(node.right) is None


RULE = Rule(
    id="coarse-comparison",
    severity=Severity.ERROR,
    title="little is left of what is compared",
    why="Means, signs and rounded values agree in ports that agree in nothing else.",
    remedy="Compare the outputs themselves, element by element.",
    check=check,
    bad=(
        in_test(judge="    assert torch.equal(out1.round(), out3.round())\n"),
        in_test(judge="    torch.testing.assert_close(torch.sign(out1), torch.sign(out3))\n"),
        in_test(judge="    assert abs(out1.mean() - out3.mean()) < 1e-4\n"),
        in_test(judge="    assert abs(out1.norm().item() - out3.norm().item()) < 1e-4\n"),
        in_test(
            judge="    assert torch.equal(out1.flatten().sort().values.int(), out3.flatten().sort().values.int())\n"
        ),
        in_test(judge="    torch.testing.assert_close(out1.sum(), out3.sum())\n"),
    ),
    good=(
        in_test(judge="    assert (out1 - out3).abs().max() < 1e-4\n"),
        in_test(judge="    torch.testing.assert_close(out1.mean(dim=-1), out3.mean(dim=-1), atol=1e-4, rtol=0)\n"),
        in_test(judge="    error = out1 - out3\n    assert error.norm() / out1.norm() < 1e-3\n"),
    ),
)
