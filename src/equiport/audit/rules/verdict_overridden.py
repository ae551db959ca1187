"""Verdicts that are replaced before they count."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import VERDICT
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule


def check(module: ParsedModule) -> Iterator[Hit]:
    """A name that holds a verdict is given True afterwards, or a default beside it is taken in its place."""
    if module.role is not Role.TEST:
        return
    for function in module.functions:
        judged: dict[str, int] = {}
        loops = [node for node in ast.walk(function) if isinstance(node, (ast.For, ast.While))]
        assigns = sorted(
            (node for node in ast.walk(function) if isinstance(node, ast.Assign)), key=lambda node: node.lineno
        )
        for node in assigns:
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if VERDICT in module.flow.origins(node.value) and not isinstance(node.value, ast.Constant):
                for name in names:
                    judged.setdefault(name, node.lineno)
            elif isinstance(node.value, ast.Constant) and node.value.value is True:
                for name in names:
                    again = any(_within(loop, node) and _judges(module, loop, name) for loop in loops)
                    if name in judged and judged[name] < node.lineno or (again and name in judged):
                        yield Hit(node, f"{name} holds a verdict and is set to True")
        for item in ast.walk(function):
            if isinstance(item, ast.IfExp) and _always_true(item) and VERDICT in module.flow.origins(item.test):
                yield Hit(item, "is True whatever the verdict says")


def _within(around: ast.AST, node: ast.AST) -> bool:
    return any(item is node for item in ast.walk(around))


def _judges(module: ParsedModule, loop: ast.AST, name: str) -> bool:
    """Whether the loop binds a verdict to the name, before or after."""
    return any(
        isinstance(item, ast.Assign)
        and any(getattr(target, "id", "") == name for target in item.targets)
        and VERDICT in module.flow.origins(item.value)
        for item in ast.walk(loop)
    )


def _always_true(node: ast.IfExp) -> bool:
    return all(isinstance(item, ast.Constant) and item.value is True for item in (node.body, node.orelse))


_RESULT = "    ok = check_3tensor_result(compare_3tensors(out1, out2, out3), 'm', 1.2)\n"

RULE = Rule(
    id="verdict-overridden",
    severity=Severity.ERROR,
    title="a verdict is replaced by True",
    why="What is asserted then is a constant.",
    remedy="Assert what the comparator said.",
    check=check,
    bad=(
        in_test(judge=_RESULT + "    ok = True\n    assert ok\n"),
        in_test(judge=_RESULT + "    if not ok:\n        print('close enough')\n        ok = True\n    assert ok\n"),
        in_test(judge=_RESULT + "    assert True if ok else True\n"),
    ),
    good=(
        in_test(judge=_RESULT + "    assert ok\n"),
        in_test(
            judge="    ok = True\n    for a, b, c in [(out1, out2, out3)]:\n"
            "        ok = check_3tensor_result(compare_3tensors(a, b, c), 'm', 1.2) and ok\n    assert ok\n"
        ),
    ),
)
