"""Tests that do not run to their end."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.queries import collected_tests, comparisons, reached
from equiport.audit.rules.frame import in_test
from equiport.audit.source import FunctionNode, ParsedModule, literal

_ENDING = frozenset({
    "pytest.skip", "pytest.xfail", "pytest.importorskip", "pytest.exit", "sys.exit", "os._exit", "os.abort", "exit",
    "quit",
    "os.kill", "unittest.skip", "unittest.skipIf", "unittest.skipUnless", "pytest.mark.skip", "pytest.mark.skipif",
    "pytest.mark.xfail", "pytest.Skipped", "unittest.SkipTest", "SystemExit", "KeyboardInterrupt",
})  # fmt: skip
_LEAVING = frozenset({"sys.exit", "exit", "quit"})
_HOOKS = ("pytest_collection_modifyitems", "pytest_runtest_", "pytest_ignore_collect", "pytest_pyfunc_call",
          "pytest_sessionfinish", "pytest_report_teststatus", "pytest_collect_file", "pytest_generate_tests",
          "pytest_exception_interact", "pytest_fixture_setup", "pytest_configure")  # fmt: skip


def check(module: ParsedModule) -> Iterator[Hit]:
    """skip, xfail and exits of every kind, returns before the comparison, tests kept from being collected."""
    if module.role is not Role.TEST:
        return
    running = {item for test in collected_tests(module) for item in reached(module, test)}
    for node in module.nodes:
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
            name = module.is_any(node, _ENDING)
            read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
            if name and read and not _main(module, node) and not (name in _LEAVING and _apart(module, node, running)):
                yield Hit(node, f"{name}: what is not run is no pass")
        elif isinstance(node, ast.Assign) and any(_uncollected(target, node.value) for target in node.targets):
            yield Hit(node, "keeps tests from being collected")
    for function in module.functions:
        if function.name.startswith(_HOOKS):
            yield Hit(function, f"{function.name} can change which tests run and how they end")
    for function in collected_tests(module):
        if isinstance(function, ast.AsyncFunctionDef):
            yield Hit(function, "pytest does not run async tests by itself")
        yield from (Hit(item, "parametrised over nothing") for item in function.decorator_list if _over_nothing(item))
        early = _early_return(module, function)
        if early is not None:
            yield Hit(early, "returns before anything was compared")


def _main(module: ParsedModule, node: ast.AST) -> bool:
    """`if __name__ == "__main__": sys.exit(pytest.main())` runs in no test."""
    return any(
        isinstance(outer, ast.If) and any(getattr(item, "id", "") == "__name__" for item in ast.walk(outer.test))
        for outer in module.around(node)
    )


def _apart(module: ParsedModule, node: ast.AST, running: set[FunctionNode]) -> bool:
    """With a code that pytest takes for a failure, or in a function that no test of the file reaches."""
    parent = module.parents.get(node)
    if isinstance(parent, ast.Call) and parent.args and literal(parent.args[0]) not in (None, 0, False):
        # ends as a failure
        return True
    function = module.function_of(node)
    return function is not None and function not in running and module.path.name != "conftest.py"


def _over_nothing(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call) or getattr(decorator.func, "attr", "") != "parametrize":
        return False
    values = decorator.args[1] if len(decorator.args) > 1 else None
    return isinstance(values, (ast.List, ast.Tuple)) and not values.elts


def _uncollected(target: ast.expr, value: ast.expr) -> bool:
    name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
    if name == "__test__":
        return literal(value) is False
    return name in ("collect_ignore", "collect_ignore_glob", "pytest_plugins")


def _early_return(module: ParsedModule, function: FunctionNode) -> ast.Return | None:
    judging = {comparison.call for comparison in comparisons(module)}
    judged = min(
        (
            node.lineno for node in ast.walk(function)
            if isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and node in judging)
        ),
        default=None,
    )  # fmt: skip
    if judged is None:
        return None
    for node in ast.walk(function):
        own = module.function_of(node) is function
        if isinstance(node, ast.Return) and own and node.lineno < judged:
            return node
    return None


RULE = Rule(
    id="skipped-test",
    severity=Severity.ERROR,
    title="a test that does not run to its end",
    why="What is skipped, expected to fail or left early is no evidence, and looks like a pass.",
    remedy="Let the test run; what cannot be tested is named in the mapping or the plan.",
    check=check,
    bad=(
        in_test('    pytest.skip("no device")\n'),
        in_test('    from pytest import importorskip as need\n    need("nothing")\n'),
        in_test(head="\n@pytest.mark.xfail(strict=False)\ndef test_other():\n    assert check_3tensor_result(1, '')\n"),
        in_test("    if out3.shape != out1.shape:\n        return\n"),
        in_test(head="\n\nasync def test_later():\n    torch.testing.assert_close(1, 1.0)\n"),
        in_test(
            head="\n\n@pytest.mark.parametrize('x', [])\ndef test_none(x):\n    torch.testing.assert_close(1, x)\n"
        ),
        in_test("    import sys as s\n    s.exit(0)\n"),
        in_test(head="import os\n\npytestmark = pytest.mark.skipif(True, reason='')\n"),
        Sample("def pytest_runtest_makereport(item, call):\n    pass\n", "conftest.py"),
    ),
    good=(
        in_test(),
        in_test(head="import sys\n\nif __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))\n"),
        in_test(head="\n\ndef first(value):\n    return value[0]\n"),
    ),
)
