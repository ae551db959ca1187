"""Tests that compare nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import DRAWN, VERDICT, on_port_side, on_reference_side
from equiport.audit.identity import number_of
from equiport.audit.judged_by import (
    counts_matches,
    expects_error,
    judged_elsewhere,
    others_compare,
    runs_port,
    unittest_calls,
)
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import asserted, collected_tests, comparisons, reached
from equiport.audit.rules.frame import in_test
from equiport.audit.source import FunctionNode, ParsedModule

_SHAPE = frozenset({"shape", "dtype", "device", "ndim"})
_SHAPE_CALLS = frozenset(
    {"isinstance", "hasattr", "len", "callable", "size", "dim", "isfinite", "isnan", "isinf", "type"}
)


def check(module: ParsedModule) -> Iterator[Hit]:
    """Tests without a comparison, asserts that always hold, verdicts that nobody asserts."""
    if module.role is not Role.TEST:
        return
    found = list(comparisons(module))
    for node in module.nodes:
        if isinstance(node, ast.Assert) and _tautology(module, node.test):
            yield Hit(node, "always holds")
    for item in found:
        if item.kind in ("verdict", "predicate") and not _used(module, item.call):
            yield Hit(item.call, f"{item.name} gives a verdict that nobody asserts")
    for function in collected_tests(module):
        bodies = reached(module, function)
        inside = [item for item in found if module.function_of(item.call) in bodies]
        judging = [item.call for item in inside if item.kind in ("asserting", "block", "verdict", "predicate")]
        if judging:
            if all(_conditional(module, call) for call in judging):
                yield Hit(judging[0], "is compared under a condition alone, which may not hold")
            continue
        asserts = [node for node in module.nodes if isinstance(node, ast.Assert) and module.function_of(node) in bodies]
        if found and not asserts and expects_error(module, function):
            continue
        if judged_elsewhere(module, bodies):
            continue
        if not any(_compares(module, node.test) or counts_matches(module, node.test) for node in asserts):
            aside = _tests_no_output(module, asserts, bodies) and others_compare(module)
            said = "tests no output of the port" if aside else "compares nothing of the port with the source"
            yield Hit(function, f"{function.name} {said}", Severity.NOTE if aside else None)


def _tests_no_output(module: ParsedModule, asserts: list[ast.Assert], bodies: set[FunctionNode]) -> bool:
    """A test of configs or conversions: values are asserted, and no port is run for them."""
    values = [value for node in asserts for value in _values(node.test)]
    values += [value for function in bodies for call in unittest_calls(function) for value in call.args]
    runs = any(
        isinstance(node, ast.Call) and runs_port(module, node) for function in bodies for node in ast.walk(function)
    )
    return bool(values) and not runs and not any(_tautology(module, node.test) for node in asserts)


def _conditional(module: ParsedModule, call: ast.Call) -> bool:
    """In one branch of an `if`, not in its test; `if` around a raise is a judgement of its own."""
    inner: ast.AST = call
    for outer in module.around(call):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(outer, (ast.If, ast.While)) and inner in (*outer.body, *outer.orelse):
            return not (isinstance(outer, ast.If) and (outer.orelse or _filters(module, outer)))
        inner = outer
    return False


def _filters(module: ParsedModule, node: ast.If) -> bool:
    """A condition on the item of the loop around it: some are left out, the others are compared."""
    asked = {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}
    loop = module.parents.get(node)
    return isinstance(loop, ast.For) and bool(
        asked & {item.id for item in ast.walk(loop.target) if isinstance(item, ast.Name)}
    )


def _used(module: ParsedModule, call: ast.Call) -> bool:
    """The verdict decides something: asserted where it stands, or through a name that is asserted."""
    if asserted(module, call):
        return True
    for outer in module.around(call):
        if isinstance(outer, ast.Assign):
            names = {item.id for target in outer.targets for item in ast.walk(target) if isinstance(item, ast.Name)}
            return _read_again(module, call, names)
        if isinstance(outer, (ast.AugAssign, ast.NamedExpr)) and isinstance(outer.target, ast.Name):
            return _read_again(module, call, {outer.target.id})
        if (
            isinstance(outer, ast.Call)
            and isinstance(outer.func, ast.Attribute)
            and outer.func.attr in ("append", "extend")
        ):
            base = outer.func.value
            return isinstance(base, ast.Name) and _read_again(module, call, {base.id})
        if isinstance(outer, ast.stmt) and not isinstance(outer, (ast.Expr, ast.With)):
            return isinstance(outer, (ast.For, ast.Raise))
    return False


def _read_again(module: ParsedModule, call: ast.Call, names: set[str]) -> bool:
    function: FunctionNode | ast.Module = module.function_of(call) or module.tree
    return any(
        isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and asserted(module, node)
        for node in ast.walk(function)
    )


def _tautology(module: ParsedModule, test: ast.expr) -> bool:
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, (ast.Tuple, ast.List)):
        return bool(test.elts)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(_tautology(module, value) for value in test.values)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        if isinstance(test.ops[0], (ast.Eq, ast.Is, ast.LtE, ast.GtE)):
            return ast.dump(left) == ast.dump(right)
        numbers = number_of(module.flow, left), number_of(module.flow, right)
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant) and None not in numbers:
            return isinstance(test.ops[0], (ast.Lt, ast.Gt, ast.NotEq))
    call = test if isinstance(test, ast.Call) else None
    if (
        call is not None
        and len(call.args) >= 2
        and getattr(call.func, "attr", "") in ("allclose", "equal", "array_equal")
    ):
        return ast.dump(call.args[0]) == ast.dump(call.args[1])
    return False


def _compares(module: ParsedModule, test: ast.expr) -> bool:
    """Whether values of both sides flow into an assert; shapes, types and existence alone are none."""
    wanted = [item for item in _values(test)]
    origins = frozenset().union(*(module.flow.origins(item) for item in wanted)) - {DRAWN}
    if VERDICT in origins or "measured" in origins:
        return True
    return on_reference_side(origins) and on_port_side(origins)


def _values(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _values(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _values(test.operand)
    elif isinstance(test, ast.Compare):
        if any(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
            return
        for value in (test.left, *test.comparators):
            yield from _values(value)
    elif isinstance(test, ast.Attribute) and test.attr in _SHAPE:
        return
    elif isinstance(test, ast.Subscript):
        yield from _values(test.value)
    elif isinstance(test, ast.Call):
        name = test.func.attr if isinstance(test.func, ast.Attribute) else getattr(test.func, "id", "")
        if name in ("all", "any", "bool", "item", "not"):
            inner = [test.func.value] if isinstance(test.func, ast.Attribute) and not test.args else test.args
            for value in inner:
                yield from _values(value)
        elif name not in _SHAPE_CALLS:
            yield test
    elif not isinstance(test, ast.Constant):
        yield test


_JUDGE = "    result = compare_3tensors(out1, out2, out3)\n"

RULE = Rule(
    id="no-comparison",
    severity=Severity.ERROR,
    title="a test that compares nothing",
    why="It passes whatever the port computes.",
    remedy="Compare the port's output with the source's by the toolkit's comparator, and assert its verdict.",
    check=check,
    bad=(
        in_test(judge="    assert out3 is not None\n"),
        in_test(judge="    assert out3.shape == out1.shape and torch.isfinite(out3).all()\n"),
        in_test(judge='    print("PASS", (out1 - out3).abs().max())\n'),
        in_test("    assert True\n"),
        in_test(judge="    if torch.cuda.is_available():\n        torch.testing.assert_close(out3, out1)\n"),
        in_test(judge="    def later():\n        torch.testing.assert_close(out3, out1)\n"),
        in_test("    assert out3 == out3\n"),
        in_test(judge=_JUDGE + '    check_3tensor_result(result, "mlp", 1.2)\n'),
        in_test(judge=_JUDGE + '    print(check_3tensor_result(result, "mlp", 1.2))\n'),
        in_test(judge="    assert out3.abs().max() < 100\n", run="    out3 = NeuronMLP(CONFIG)(torch.randn(1, 2))\n"),
    ),
    good=(
        in_test(),
        in_test(judge="    torch.testing.assert_close(out3, out1, atol=1e-3, rtol=0)\n"),
        in_test(judge=_JUDGE + '    ok = check_3tensor_result(result, "mlp", 1.2)\n    assert ok, "wrong"\n'),
        in_test(judge="    verify(out1, out3)\n", head="\ndef verify(a, b):\n    assert (a - b).abs().max() < 1e-4\n"),
        in_test(run="", judge="    test_block_correctness(NeuronMLP, LlamaMLP, {})\n"),
        in_test(judge=_JUDGE + '    checks = [check_3tensor_result(result, "mlp", 1.2)]\n    assert all(checks)\n'),
    ),
)
