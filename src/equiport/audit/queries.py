"""What rules ask of a file: its tests, its comparisons, and the functions that compute."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from equiport.audit.flow import is_fixture
from equiport.audit.model import Role
from equiport.audit.names import ASSERTING, BLOCK_TESTS, PREDICATES, SAMPLE_COMPARATORS, TENSOR_COMPARATORS, VERDICTS
from equiport.audit.source import FunctionNode, ParsedModule, keywords

_FORWARD = frozenset({
    "forward", "__call__", "perform_prefill", "compute_for_token_gen", "attention_context_encode", "attention_tokengen",
    "prep_qkv_tensors", "scaled_qk", "apply_rotary_embedding", "get_model_output", "process_sequence_output",
})  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A call that compares; `sides` are the expressions compared, in the order of the call."""

    call: ast.Call
    name: str
    kind: str
    sides: tuple[ast.expr, ...]


def comparisons(module: ParsedModule) -> Iterator[Comparison]:
    """Every comparison of tensors in a file. kind: tensors, asserting, predicate, sample, block or verdict."""
    kinds = (
        ("tensors", TENSOR_COMPARATORS), ("asserting", ASSERTING), ("predicate", PREDICATES),
        ("sample", SAMPLE_COMPARATORS), ("block", BLOCK_TESTS), ("verdict", VERDICTS),
    )  # fmt: skip
    for call in module.calls:
        for kind, names in kinds:
            name = module.is_any(call.func, names)
            if name:
                yield Comparison(call, name.rpartition(".")[2], kind, _sides(module, call, kind))
                break


_KEYWORDS = {
    "tensors": ("ref_fp32", "ref_bf16", "target", "reference", "target_fp32"),
    "asserting": ("actual", "expected", "desired", "x", "y"),
    "predicate": ("input", "other", "a", "b"),
    "block": ("neuron_block_class", "pytorch_block_class"),
}


def _sides(module: ParsedModule, call: ast.Call, kind: str) -> tuple[ast.expr, ...]:
    if kind in ("sample", "verdict"):
        return ()
    count = 3 if kind == "tensors" else 2
    found = [item for item in call.args[:count] if not isinstance(item, ast.Starred)]
    given = keywords(module, call)
    return tuple([*found, *(given[name] for name in _KEYWORDS[kind] if name in given)])


def collected_tests(module: ParsedModule) -> list[FunctionNode]:
    """Functions that pytest collects: `test_*` at the top of a test file or in a `Test*` class."""
    if module.role is not Role.TEST or module.path.name == "conftest.py":
        return []
    found = []
    for node in module.functions:
        owner = module.parents.get(node)
        collected = isinstance(owner, ast.Module) or not module.function_of(node)
        if node.name.startswith("test") and collected and not is_fixture(module, node):
            found.append(node)
    return found


def reached(module: ParsedModule, start: FunctionNode) -> set[FunctionNode]:
    """The function and all functions of this file that it may call, by name."""
    by_name: dict[str, list[FunctionNode]] = {}
    for node in module.functions:
        by_name.setdefault(node.name, []).append(node)
    seen, waiting = {start}, [start]
    while waiting:
        for item in ast.walk(waiting.pop()):
            name = item.id if isinstance(item, ast.Name) else item.attr if isinstance(item, ast.Attribute) else ""
            for other in by_name.get(name, ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
    return seen


def compute_functions(module: ParsedModule) -> set[FunctionNode]:
    """Functions that run when the port computes: forwards, and what they call through self or by name."""
    found: set[FunctionNode] = set()
    by_name: dict[str, list[FunctionNode]] = {}
    for node in module.functions:
        by_name.setdefault(node.name, []).append(node)
    waiting = [node for node in module.functions if node.name in _FORWARD and module.class_of(node)]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            func = call.func
            if isinstance(func, ast.Name):
                waiting += by_name.get(func.id, [])
            elif (
                isinstance(func, ast.Attribute)
                and isinstance(func.value, ast.Name)
                and func.value.id in ("self", "cls")
            ):
                waiting += by_name.get(func.attr, [])
    return {node for node in found if node.name not in ("__init__", "load_hf_model")}


def in_any(module: ParsedModule, node: ast.AST, functions: set[FunctionNode]) -> bool:
    """Whether a node lies in one of the functions."""
    return any(outer in functions for outer in module.around(node))


def asserted(module: ParsedModule, node: ast.AST) -> bool:
    """Whether an expression's value decides an assert, an `if ... raise/fail`, or is returned."""
    for outer in module.around(node):
        if isinstance(outer, (ast.Assert, ast.Return)):
            return True
        if isinstance(outer, ast.Call) and getattr(outer.func, "attr", "").startswith("assert"):
            return True
        if isinstance(outer, ast.If) and _within(module, node, outer.test):
            return any(isinstance(item, (ast.Raise, ast.Assert)) or _fails(item) for item in ast.walk(outer))
        if isinstance(outer, ast.stmt) and not isinstance(outer, (ast.Expr, ast.With)):
            return False
    return False


def _fails(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("fail", "exit")


def _within(module: ParsedModule, node: ast.AST, around: ast.AST) -> bool:
    return node is around or any(outer is around for outer in module.around(node))
