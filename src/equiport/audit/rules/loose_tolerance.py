"""Tolerances beyond the policy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT
from equiport.audit.identity import number_of
from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.names import TOLERANT, VERDICTS
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, keywords

#: atol of the translate-model workflow, rtol of torch.testing for bfloat16, R of the Equivalence guide.
ATOL, RTOL, RATIO = 1e-3, 1.6e-2, 1.2
_CLASSES = frozenset({"equiport.compare.Thresholds", "equiport.compare.thresholds.Thresholds"})
# limits of compare.thresholds.Thresholds: (shipped, True where higher is stricter)
_LIMITS = {
    "r32_pooled": (1e-3, False), "r32_slice": (2e-3, False), "r_single": (1.2, False), "r_geomean": (1.10, False),
    "r_component": (1.5, False), "r_layer": (1.2, False), "linf_ratio": (50.0, False), "r_slice": (100.0, False),
    "tau_r": (1.2, False), "p95_ratio": (1.3, False), "delta": (0.01, False), "theta": (0.995, True),
    "top1": (0.9, True), "bc": (0.99, True), "sigma": (1.0, False), "match_rate": (0.30, True),
    "min_prompts": (10, True), "min_match_tokens": (32, True), "min_seeds": (3, True), "baseline_noise": (0.5, False),
    "own_noise": (1.69, False), "stack_linf_ratio": (5.0, False),
}  # fmt: skip
_REDUCING = ("max", "mean", "abs", "item", "amax", "sum", "norm", "float")
_CONSTANTS = {"TOLERANCE_RATIO": (RATIO, False), "TAU_R": (1.2, False), "THETA": (0.995, True), "DELTA": (0.01, False)}


def check(module: ParsedModule) -> Iterator[Hit]:
    """atol, rtol, the tolerance ratio, thresholds and hand-written limits, through names and arithmetic."""
    if module.role is Role.PORT:
        return
    for call in module.calls:
        given = keywords(module, call)
        if module.is_any(call.func, TOLERANT):
            yield from _tolerances(module, call, given)
        elif module.is_any(call.func, VERDICTS):
            ratio = given.get("tolerance_ratio", call.args[2] if len(call.args) > 2 else None)
            yield from _limit(module, call, "tolerance_ratio", ratio, RATIO, False)
        elif module.is_any(call.func, _CLASSES):
            for name, (limit, higher) in _LIMITS.items():
                yield from _limit(module, call, name, given.get(name), limit, higher)
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id in _CONSTANTS:
                    yield from _limit(module, node, target.id, node.value, *_CONSTANTS[target.id])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and module.role is Role.TEST:
            yield from _by_hand(module, node)


def _tolerances(module: ParsedModule, call: ast.Call, given: dict[str, ast.expr]) -> Iterator[Hit]:
    numpy = any(name.startswith("numpy") for name in module.dotted(call.func))
    # torch.allclose(a, b, rtol, atol) and numpy's give them by position too
    placed = (
        dict(zip(("rtol", "atol"), call.args[2:4], strict=False)) if numpy or "allclose" in ast.dump(call.func) else {}
    )
    for name, limit in (("atol", ATOL), ("rtol", RTOL)):
        yield from _limit(module, call, name, given.get(name, placed.get(name)), limit, False)
    if "decimal" in given:
        yield from _limit(module, call, "decimal", given["decimal"], 3, True)
    if "equal_nan" in given and getattr(given["equal_nan"], "value", False) is True:
        yield Hit(call, "equal_nan=True takes NaN on both sides for equal")


def _limit(
    module: ParsedModule, at: ast.AST, name: str, value: ast.expr | None, limit: float, higher: bool
) -> Iterator[Hit]:
    if value is None:
        return
    number = number_of(module.flow, value)
    if number is None:
        if isinstance(value, (ast.Constant, ast.Name, ast.Attribute)) and PORT not in module.flow.origins(value):
            return
        yield Hit(at, f"{name} is computed, so that it can grow with the error", Severity.WARNING)
    elif (number < limit if higher else number > limit * (1 + 1e-9)) or number != number:
        yield Hit(at, f"{name} = {number:g}, the policy's limit is {limit:g}")


def _by_hand(module: ParsedModule, node: ast.Compare) -> Iterator[Hit]:
    """`(a - b).abs().max() < 0.5`: an absolute difference against a number, in an assert."""
    if not isinstance(module.parents.get(node), (ast.Assert, ast.BoolOp)):
        return
    less = isinstance(node.ops[0], (ast.Lt, ast.LtE))
    error, limit = (node.left, node.comparators[0]) if less else (node.comparators[0], node.left)
    if not less and not isinstance(node.ops[0], (ast.Gt, ast.GtE)):
        return
    number = number_of(module.flow, limit)
    if number is not None and number > ATOL and _difference(module, error, 0) and _relative(error) is False:
        yield Hit(node, f"a difference is let through up to {number:g}, the policy's limit is {ATOL:g}")


def _difference(module: ParsedModule, node: ast.expr, depth: int) -> bool:
    """max/mean of abs of a difference of values of both sides."""
    if depth > 10:
        return False
    if isinstance(node, ast.Name):
        return any(_difference(module, item, depth + 1) for item in module.flow.scopes.bindings(node))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _REDUCING:
        inner = [node.func.value, *node.args]
        return any(_difference(module, item, depth + 1) for item in inner)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "abs", "max"):
        return any(_difference(module, item, depth + 1) for item in node.args)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return PORT in module.flow.origins(node.left) or PORT in module.flow.origins(node.right)
    return False


def _relative(node: ast.expr) -> bool:
    return any(isinstance(item, ast.BinOp) and isinstance(item.op, ast.Div) for item in ast.walk(node))


def _close(arguments: str) -> str:
    return f"    torch.testing.assert_close(out3, out1, {arguments})\n"


RULE = Rule(
    id="loose-tolerance",
    severity=Severity.ERROR,
    title="a tolerance looser than the policy",
    why="A wrong port passes when the limit is wide enough.",
    remedy="Use the shipped limits (R < 1.2, atol 1e-3); looser ones come from a calibration file alone.",
    check=check,
    bad=(
        in_test(judge=_close("atol=1e-1, rtol=0")),
        in_test(judge=_close("atol=LIMIT * 10, rtol=0"), head="LIMIT = 1e-2\n"),
        in_test(judge="    assert torch.allclose(out1, out3, 0.5, 1e-5)\n"),
        in_test(judge='    assert check_3tensor_result(compare_3tensors(out1, out2, out3), "m", 5.0)\n'),
        in_test(judge="    assert (out1 - out3).abs().max().item() < 0.5\n"),
        in_test(judge="    worst = (out1 - out3).abs().max()\n    assert worst < 0.5\n"),
        in_test(judge=_close("atol=2 * (out3 - out1).abs().max().item(), rtol=0")),
        Sample("TOLERANCE_RATIO = 50.0\n", "conftest.py"),
    ),
    good=(
        in_test(),
        in_test(judge=_close("atol=1e-3, rtol=0")),
        in_test(judge="    assert (out1 - out3).abs().max() < 1e-4\n"),
        in_test(
            judge='    assert check_3tensor_result(compare_3tensors(out1, out2, out3), "m", tolerance_ratio=1.1)\n'
        ),
    ),
)
