"""Comparisons of a few elements of what was computed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import comparisons
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, literal

_FEW = 16


def check(module: ParsedModule) -> Iterator[Hit]:
    """Both sides cut to a literal slice of the last dimension, or to the first elements of a flat tensor."""
    if module.role is not Role.TEST:
        return
    for found in comparisons(module):
        if found.kind in ("tensors", "asserting", "predicate") and len(found.sides) >= 2:
            cut = [_cut(module, side, 0) for side in found.sides]
            if all(cut):
                yield Hit(found.call, f"only {cut[0]} of each side is compared")


def _cut(module: ParsedModule, node: ast.expr, depth: int) -> str:
    """How a side is cut, read through names and steps that keep the values; empty: not at all."""
    if depth > 10:
        return ""
    if isinstance(node, ast.Name):
        bound = module.flow.scopes.last(node)
        return _cut(module, bound, depth + 1) if bound is not None else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "narrow" and len(node.args) == 3 and literal(node.args[0]) == -1:
            return f"[{ast.unparse(node)[-30:]}]"
        return _cut(module, node.func.value, depth + 1)
    if not isinstance(node, ast.Subscript):
        return ""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    last = parts[-1]
    flat = _flat(node.value)
    indexed = [item for item in parts if isinstance(literal(item), int)]
    if isinstance(last, ast.Slice) and (len(parts) > 1 or flat) and _short(last):
        return f"[{ast.unparse(node.slice)}]"
    if len(parts) >= 3 and len(indexed) == len(parts):
        return f"[{ast.unparse(node.slice)}]"
    return _cut(module, node.value, depth + 1)


def _short(node: ast.Slice) -> bool:
    low, high = literal(node.lower) or 0, literal(node.upper)
    if not isinstance(low, int) or not isinstance(high, int) or isinstance(high, bool):
        return False
    return 0 <= high - low <= _FEW if high > 0 else False


def _flat(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in ("flatten", "ravel") or (node.func.attr in ("view", "reshape")
             and len(node.args) == 1 and literal(node.args[0]) == -1))
    )  # fmt: skip


RULE = Rule(
    id="few-elements",
    severity=Severity.ERROR,
    title="a few elements stand for all",
    why="A wrong head, row or channel lies outside of what is looked at.",
    remedy="Compare whole outputs; of a long sequence the last position may be enough, of the channels never a part.",
    check=check,
    bad=(
        in_test(judge="    torch.testing.assert_close(out3[..., :4], out1[..., :4])\n"),
        in_test(judge="    assert torch.allclose(out1.flatten()[:10], out3.flatten()[:10], atol=1e-4)\n"),
        in_test(judge="    assert torch.equal(out1[0, 0, 0], out3[0, 0, 0])\n"),
        in_test(
            "    a, b, c = out1[:, :, 0:8], out2[:, :, 0:8], out3[:, :, 0:8]\n",
            judge='    assert check_3tensor_result(compare_3tensors(a, b, c), "m", 1.2)\n',
        ),
    ),
    good=(
        in_test(judge="    torch.testing.assert_close(out3[:, -1], out1[:, -1], atol=1e-4, rtol=0)\n"),
        in_test(judge="    torch.testing.assert_close(out3[0], out1[0], atol=1e-4, rtol=0)\n"),
        in_test(judge="    torch.testing.assert_close(out3[:, :, :512], out1[:, :, :512], atol=1e-4, rtol=0)\n"),
    ),
)
