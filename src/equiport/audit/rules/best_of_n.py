"""Verdicts of which only the best counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, VERDICT
from equiport.audit.identity import number_of
from equiport.audit.judged_by import counts_matches
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, literal

_BEST = frozenset({"any", "max", "min", "builtins.any", "builtins.max", "builtins.min", "torch.any", "sorted"})
_FEW_TOKENS = 8


def check(module: ParsedModule) -> Iterator[Hit]:
    """any, max, min and `or` over verdicts, counts of passes with a lower bar, loops that end with the first pass."""
    if module.role is not Role.TEST:
        return
    flow = module.flow
    for node in module.nodes:
        if isinstance(node, ast.Call):
            best = module.is_any(node.func, _BEST)
            if best and node.args and VERDICT in flow.origins(node.args[0]) and not _negated(module, node):
                yield Hit(node, f"{best} over verdicts: one good case hides the bad ones")
            yield from _few(module, node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr) and VERDICT in flow.origins(node.value):
            yield Hit(node, "a verdict or an earlier one: either is enough")
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            kept = isinstance(module.parents.get(node), (ast.Assert, ast.Assign, ast.Return, ast.Call))
            if kept and any(VERDICT in flow.origins(value) for value in node.values):
                yield Hit(node, "a verdict or something else: either is enough")
        elif isinstance(node, (ast.For, ast.While)):
            early = _first_pass(module, node)
            if early is not None:
                yield Hit(early, "the loop ends with the first pass")
        elif isinstance(node, ast.Compare) and _share(module, node):
            yield Hit(node, "counts passes against a bar: every case must pass")
        elif isinstance(node, ast.Compare) and _bar(module, node):
            yield Hit(node, "counts matches against a bar: the others may be wrong", Severity.WARNING)


def _bar(module: ParsedModule, node: ast.Compare) -> bool:
    """`assert matches / total >= 0.75`."""
    asserted = isinstance(module.parents.get(node), ast.Assert) and isinstance(node.ops[0], (ast.Gt, ast.GtE))
    return asserted and counts_matches(module, node.left)


def _negated(module: ParsedModule, node: ast.Call) -> bool:
    """`assert not any(failed ...)` says that all are well."""
    return isinstance(module.parents.get(node), ast.UnaryOp)


def _first_pass(module: ParsedModule, loop: ast.For | ast.While) -> ast.AST | None:
    for node in ast.walk(loop):
        negated = isinstance(node, ast.If) and isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        if isinstance(node, ast.If) and not negated and VERDICT in module.flow.origins(node.test):
            for item in node.body:
                if isinstance(item, (ast.Break, ast.Return)):
                    return item
    return None


def _share(module: ParsedModule, node: ast.Compare) -> bool:
    if not isinstance(node.ops[0], (ast.Gt, ast.GtE)) or not isinstance(literal(node.comparators[0]), (int, float)):
        return False
    for item in ast.walk(node.left):
        counts = isinstance(item, ast.Call) and getattr(item.func, "id", "") in ("sum", "len") and item.args
        if counts and isinstance(item, ast.Call) and VERDICT in module.flow.origins(item.args[0]):
            return True
    return False


def _few(module: ParsedModule, call: ast.Call) -> Iterator[Hit]:
    parent = module.parents.get(call)
    dropped = isinstance(parent, ast.Expr) or (isinstance(parent, ast.Assign) and ast.unparse(parent.targets[0]) == "_")
    if dropped:
        return
    for keyword in call.keywords:
        if keyword.arg in ("max_new_tokens", "num_tokens", "num_tokens_to_check"):
            number = number_of(module.flow, keyword.value)
            if number is not None and number < _FEW_TOKENS and PORT in module.flow.origins(call.func):
                yield Hit(call, f"{keyword.arg} = {number:g}: so few tokens prove little", Severity.WARNING)


_LOOP = """    for seed in range(10):
        torch.manual_seed(seed)
        y = torch.randn(2, 4)
        result = compare_3tensors(ref_fp32(y), ref_bf16(y), target(y))
        if check_3tensor_result(result, "m", 1.2):
            break
    else:
        assert False
"""
_TOKENS = """    same = 0
    for a, b in zip(out1.argmax(-1).tolist(), out3.argmax(-1).tolist()):
        if a == b:
            same += 1
    assert same / 48 >= 0.5
"""
_EACH = "    results = [check_3tensor_result(compare_3tensors(out1, out2, out3), str(i), 1.2) for i in range(3)]\n"

RULE = Rule(
    id="best-of-n",
    severity=Severity.ERROR,
    title="only the best case counts",
    why="Repeated often enough, a wrong port passes once.",
    remedy="Assert every prompt, seed and layer; average only what the toolkit's gates average.",
    check=check,
    bad=(
        in_test(judge=_EACH + "    assert any(results)\n"),
        in_test(judge=_EACH + "    assert sum(results) >= 1\n"),
        in_test(judge=_EACH + "    best = max(results)\n    assert best\n"),
        in_test(judge=_LOOP),
        in_test(judge=_TOKENS),
        in_test(judge="    assert torch.allclose(out1, out3, atol=1e-4) or out3.shape == out1.shape\n"),
    ),
    good=(
        in_test(judge=_EACH + "    assert all(results)\n"),
        in_test(judge="    assert max((out1 - out3).abs().max() for _ in range(2)) < 1e-4\n"),
        in_test(judge=_EACH + "    assert not any(not item for item in results)\n"),
    ),
)
