"""Arguments that are written to."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import FunctionNode, ParsedModule

#: What a forward is given to compute from; caches and buffers are there to be written to.
_INPUTS = frozenset({"x", "hidden_states", "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"})
_WRITING = frozenset({"add_", "mul_", "copy_", "zero_", "fill_", "sub_", "div_", "masked_fill_", "index_copy_",
                      "scatter_",
                      "clamp_", "normal_", "uniform_"})  # fmt: skip


def check(module: ParsedModule) -> Iterator[Hit]:
    """Operations in place on a forward's inputs, where the name was not bound anew."""
    if module.role is not Role.PORT:
        return
    for function in module.functions:
        if function.name != "forward" or module.class_of(function) is None:
            continue
        inputs = _INPUTS & {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        inputs -= _bound_anew(function)
        for node in ast.walk(function):
            name = _written(node)
            if name in inputs:
                yield Hit(node, f"{name} is changed in place: the caller's tensor changes too")


def _bound_anew(function: FunctionNode) -> set[str]:
    return {
        item.id
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.withitem, ast.NamedExpr))
        for target in (
            node.targets if isinstance(node, ast.Assign)
            else [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars
            else [] if isinstance(node, ast.withitem) else [node.target]
        )
        for item in ast.walk(target)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }  # fmt: skip


def _written(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _WRITING:
        return getattr(node.func.value, "id", "")
    if isinstance(node, ast.AugAssign):
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return getattr(target, "id", "")
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                return getattr(target.value, "id", "")
    return ""


RULE = Rule(
    id="argument-mutated",
    severity=Severity.WARNING,
    title="an input is changed in place",
    why="A reference that runs afterwards on the same tensor is given what the port made of it.",
    remedy="Work on a copy, or bind the result to a new name.",
    check=check,
    bad=(
        in_forward("        x.zero_()\n        return x\n"),
        in_forward("        x[:] = 0\n        return x\n"),
        in_forward("        x += 1\n        return x\n"),
    ),
    good=(
        in_forward("        x = x + 1\n        x += 1\n        return x\n"),
        in_forward("        y = x.clone()\n        y += 1\n        return y\n"),
    ),
)
