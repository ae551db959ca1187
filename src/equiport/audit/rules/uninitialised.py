"""Buffers that are returned before anything was written into them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.identity import root_of
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import FunctionNode, ParsedModule, literal

_EMPTY = frozenset({"torch.empty", "torch.empty_like", "torch.empty_strided", "numpy.empty", "torch.Tensor"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """`torch.empty` returned as it is from what computes."""
    if module.role is not Role.PORT:
        return
    for function in compute_functions(module):
        written = names_written(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None and module.function_of(node) is function:
                for part in node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]:
                    if isinstance(part, ast.Name) and part.id in written:
                        continue
                    root = root_of(module.flow, part)
                    if isinstance(root, ast.Call) and _empty(module, root) and not passed_on(function, part):
                        yield Hit(node, "returns memory that nothing was written to")


def _empty(module: ParsedModule, call: ast.Call) -> bool:
    name = module.is_any(call.func, _EMPTY) or (getattr(call.func, "attr", "") in ("new_empty", "new_empty_strided"))
    zero = len(call.args) == 1 and literal(call.args[0]) == 0
    # no dimension given, or one of size 0: holds nothing
    inner = call.args[0].elts if call.args and isinstance(call.args[0], (ast.Tuple, ast.List)) else call.args
    return bool(name) and bool(call.args) and not zero and not any(literal(item) == 0 for item in inner)


def names_written(function: FunctionNode) -> set[str]:
    """Names that are written into: subscripts, methods that end in `_`, operators in place, out=."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                base = target
                while isinstance(base, (ast.Subscript, ast.Attribute)):
                    base = base.value
                if isinstance(base, ast.Name) and (base is not target or isinstance(node, ast.AugAssign)):
                    found.add(base.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            while isinstance(base, (ast.Subscript, ast.Attribute)):
                base = base.value
            if node.func.attr.endswith("_") and isinstance(base, ast.Name):
                found.add(base.id)
            found.update(
                item.value.id for item in node.keywords if item.arg == "out" and isinstance(item.value, ast.Name)
            )
    return found


def passed_on(function: FunctionNode, part: ast.expr) -> bool:
    """Given to another function, which may write into it (a kernel, a collective)."""
    if not isinstance(part, ast.Name):
        return False
    return any(
        isinstance(item, ast.Name) and item.id == part.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for item in (*node.args, *(keyword.value for keyword in node.keywords))
    )


RULE = Rule(
    id="uninitialised",
    severity=Severity.ERROR,
    title="uninitialised memory is returned",
    why="It often still holds the other side's result from a moment ago.",
    remedy="Compute the value; allocate with zeros where a buffer is needed.",
    check=check,
    bad=(
        in_forward("        return torch.empty_like(x)\n"),
        in_forward("        out = torch.empty(x.shape)\n        return out\n"),
        in_forward("        return x.new_empty(2, 4), x\n"),
    ),
    good=(
        in_forward("        out = torch.empty_like(x)\n        out[:] = x\n        return out\n"),
        in_forward("        out = torch.empty_like(x)\n        out.copy_(x)\n        return out\n"),
        in_forward("        return torch.empty(0)\n"),
        in_forward("        out = torch.empty_like(x)\n        kernel(x, out)\n        return out\n"),
    ),
)
