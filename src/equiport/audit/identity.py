"""Whether two expressions are one value, and which number an expression is."""

from __future__ import annotations

import ast

from equiport.audit.flow import Flow
from equiport.audit.source import literal

_PURE = frozenset({"float", "clone", "detach", "to", "cpu", "contiguous", "double", "bfloat16", "half", "type", "numpy",
                   "view", "reshape", "squeeze", "unsqueeze", "flatten", "item", "copy", "data", "last_hidden_state",
                   "logits", "view_as", "type_as", "requires_grad_", "expand_as"})  # fmt: skip


def root_of(flow: Flow, node: ast.expr, depth: int = 0) -> ast.AST | str:
    """The call or name that a value is, read through names bound once and steps that keep the values."""
    if depth > 40:
        return node
    if isinstance(node, ast.Name):
        bound = flow.scopes.last(node)
        if bound is not None and not isinstance(bound, (ast.GeneratorExp, ast.ListComp)):
            return root_of(flow, bound, depth + 1)
        return f"name {node.id} of {id(flow.scopes.scope_of(node))}"
    if isinstance(node, ast.Call):
        named = flow.module.dotted(node.func)
        if named & {"copy.deepcopy", "copy.copy", "torch.clone", "torch.as_tensor", "torch.detach"}:
            return root_of(flow, node.args[0], depth + 1) if node.args else node
        if not named and isinstance(node.func, ast.Attribute) and node.func.attr in _PURE:
            return root_of(flow, node.func.value, depth + 1)
        return node
    if isinstance(node, ast.Attribute) and node.attr in _PURE:
        return root_of(flow, node.value, depth + 1)
    if isinstance(node, ast.BinOp):
        keeps = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.Div: 1}.get(type(node.op))
        if keeps is not None and literal(node.right) == keeps:
            return root_of(flow, node.left, depth + 1)
    if isinstance(node, ast.Subscript):
        parts = flow.returned_parts(node)
        if len(parts) == 1:
            return f"{_named(root_of(flow, parts[0], depth + 1))} in {_named(root_of(flow, node.value, depth + 1))}"
        when = f" at {getattr(node, 'lineno', 0)}" if _handed_over(flow, node.value) else ""
        return f"{ast.dump(node.slice)} of {_named(root_of(flow, node.value, depth + 1))}{when}"
    return node


def _handed_over(flow: Flow, container: ast.expr) -> bool:
    """Whether a container is given to a function, which may put other values into it."""
    if not isinstance(container, ast.Name):
        return False
    around = flow.module.function_of(container) or flow.module.tree
    return any(
        isinstance(item, ast.Name) and item.id == container.id
        for node in ast.walk(around)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("len", "print", "list", "zip")
        for item in (*node.args, *(keyword.value for keyword in node.keywords))
    )


def _named(found: ast.AST | str) -> str:
    return found if isinstance(found, str) else f"node {id(found)}"


def same_value(flow: Flow, one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are one value."""
    return _named(root_of(flow, one)) == _named(root_of(flow, other))


def number_of(flow: Flow, node: ast.AST | None, depth: int = 0) -> float | None:
    """The number that an expression is known to be: literals, arithmetic on them, names bound to one value."""
    value = literal(node)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if depth > 20 or node is None:
        return None
    if isinstance(node, ast.Name):
        bound = flow.scopes.bindings(node)
        numbers = [number_of(flow, item, depth + 1) for item in bound]
        if numbers and all(item is not None for item in numbers):
            return max(item for item in numbers if item is not None)
        return _imported_number(flow, flow.module.dotted(node), depth) if not bound else None
    if isinstance(node, ast.Attribute):
        return _imported_number(flow, flow.module.dotted(node), depth)
    if isinstance(node, ast.BinOp):
        left, right = number_of(flow, node.left, depth + 1), number_of(flow, node.right, depth + 1)
        if left is None or right is None:
            return None
        try:
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Div):
                return left / right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Pow) and abs(right) < 100:
                value = left**right
                return float(value) if isinstance(value, (int, float)) else None
        except (ArithmeticError, ValueError):
            return None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        text = literal(node.args[0])
        try:
            return float(text) if isinstance(text, (str, int, float)) else None
        except ValueError:
            return None
    return None


def _imported_number(flow: Flow, names: frozenset[str], depth: int) -> float | None:
    for name in sorted(names):
        other = flow.module.work.module(name) if flow.module.work else None
        if other is not None and other is not flow.module:
            bound = other.flow.scopes.of(other.tree).bound.get(name.rpartition(".")[2], [])
            numbers = [number_of(other.flow, item, depth + 1) for item in bound]
            if numbers and all(item is not None for item in numbers):
                return max(item for item in numbers if item is not None)
    return None
