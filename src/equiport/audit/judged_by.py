"""What the rule about tests that compare nothing asks beside: helpers of other files, and tests of no output."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, on_port_side, on_reference_side
from equiport.audit.model import Role
from equiport.audit.queries import comparisons, reached
from equiport.audit.source import FunctionNode, ParsedModule


def unittest_calls(function: FunctionNode) -> Iterator[ast.Call]:
    """`self.assertEqual(...)` and the like."""
    for node in ast.walk(function):
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and method.attr.startswith("assert") and getattr(method.value, "id", "") == "self":
            assert isinstance(node, ast.Call)
            yield node


def judged_elsewhere(module: ParsedModule, bodies: set[FunctionNode]) -> bool:
    """Whether a function of a neighbouring file is given both sides, and asserts or raises by them."""
    for call in module.calls:
        if module.function_of(call) not in bodies or module.work is None:
            continue
        values = (*call.args, *(item.value for item in call.keywords))
        given = frozenset().union(*(module.flow.origins(item) for item in values))
        if on_port_side(given) and on_reference_side(given):
            for dotted in module.dotted(call.func):
                *_, file, name = ("", *dotted.lstrip(".").split("."))
                for other in module.work.modules:
                    near = other is not module and other.name == file and not _is_port(other)
                    if near and any(item.name == name and _asserts(other, item) for item in other.functions):
                        return True
    return False


def _is_port(module: ParsedModule) -> bool:
    """A helper in a folder of tests may import the stack and is none."""
    return module.role is Role.PORT and not {"test", "tests"} & set(module.path.parts)


def _asserts(module: ParsedModule, function: FunctionNode) -> bool:
    inside = {item.call for item in comparisons(module) if item.kind in ("asserting", "block")}
    return any(
        isinstance(node, (ast.Assert, ast.Raise)) or node in inside
        for body in reached(module, function)
        for node in ast.walk(body)
    )


def counts_matches(module: ParsedModule, value: ast.expr) -> bool:
    """Whether a value is a counter that grows where something of the source equals something of the port."""
    names = {item.id for item in ast.walk(value) if isinstance(item, ast.Name)}
    for node in module.nodes if names else ():
        if isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") in names:
            if module.function_of(node) is not module.function_of(value):
                continue
            for outer in module.around(node):
                if isinstance(outer, ast.If):
                    given = module.flow.origins(outer.test)
                    if on_port_side(given) and on_reference_side(given):
                        return True
    return False


def runs_port(module: ParsedModule, call: ast.Call) -> bool:
    """A call of what is no imported name, on the port's side: an instance, or a method that runs one."""
    if module.dotted(call.func):
        return False
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    called = isinstance(call.func, ast.Name) and not module.defines(call.func.id)
    return (called or method in ("forward", "generate", "__call__")) and PORT in module.flow.origins(call.func)


def others_compare(module: ParsedModule) -> bool:
    """Whether some test of the folder compares."""
    modules = module.work.modules if module.work is not None else (module,)
    return any(item.role is Role.TEST and any(True for _ in comparisons(item)) for item in modules)


def expects_error(module: ParsedModule, function: FunctionNode) -> bool:
    """`with pytest.raises(...)`: a test of what is refused, beside tests that compare."""
    return any(
        isinstance(node, ast.withitem)
        and isinstance(node.context_expr, ast.Call)
        and (
            module.is_any(node.context_expr.func, frozenset({"pytest.raises", "pytest.warns"}))
            or getattr(node.context_expr.func, "attr", "").startswith("assertRaises")
        )
        for node in ast.walk(function)
    )
