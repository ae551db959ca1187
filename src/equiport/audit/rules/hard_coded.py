"""Outputs that are written into the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.identity import root_of
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import comparisons, compute_functions
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import FunctionNode, ParsedModule, literal

_MAKING = frozenset({"torch.tensor", "torch.as_tensor", "torch.FloatTensor", "numpy.array", "torch.from_numpy"})
_EQUAL = frozenset({"torch.equal", "torch.allclose"})
_MANY = 4
_SUMS = ("sum", "mean", "item", "norm", "std")


def check(module: ParsedModule) -> Iterator[Hit]:
    """Literal tensors that are compared or returned, and outputs chosen by recognising an input."""
    if module.role is Role.TEST:
        for found in comparisons(module):
            for side in found.sides:
                root = root_of(module.flow, side)
                if isinstance(root, ast.Call) and _literal_tensor(module, root):
                    yield Hit(found.call, "one side is written out in the test")
    if module.role is not Role.PORT:
        return
    for function in compute_functions(module):
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                root = root_of(module.flow, node.value)
                if isinstance(root, ast.Call) and _literal_tensor(module, root):
                    yield Hit(node, "returns numbers that are written into the code")
            elif isinstance(node, ast.If) and _recognises(module, function, node.test):
                yield Hit(node, "recognises an input by its values")


def _literal_tensor(module: ParsedModule, call: ast.Call) -> bool:
    if not module.is_any(call.func, _MAKING) or not call.args:
        return False
    numbers = [item for item in ast.walk(call.args[0]) if isinstance(literal(item), (int, float))]
    other = [item for item in ast.walk(call.args[0]) if isinstance(item, (ast.Name, ast.Call, ast.Attribute))]
    return len(numbers) >= _MANY and not other


def _recognises(module: ParsedModule, function: FunctionNode, test: ast.expr) -> bool:
    """`torch.equal(x, KNOWN)` with a literal or stored tensor; `x.sum() == 3.7` with a literal float."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Call)
            and module.is_any(node.func, _EQUAL)
            and len(node.args) >= 2
            and any(
                isinstance(root := root_of(module.flow, item), ast.Call) and _literal_tensor(module, root)
                for item in node.args[:2]
            )
        ):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            values = [literal(item) for item in (node.left, *node.comparators)]
            floats = [value for value in values if isinstance(value, float) and value not in (0.0, 1.0, 0.5, 2.0)]
            sums = [
                item for item in ast.walk(node)
                if isinstance(item, ast.Call) and getattr(item.func, "attr", "") in _SUMS
            ]  # fmt: skip
            if floats and sums:
                return True
    return False


RULE = Rule(
    id="hard-coded",
    severity=Severity.ERROR,
    title="outputs are written into the code",
    why="Such a test or port is right for the one case that was copied.",
    remedy="Compute the value; take the expected one from the source's class.",
    check=check,
    bad=(
        in_test(
            "    out1 = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])\n",
            run="    out2 = out3 = NeuronMLP(CONFIG)(torch.ones(1, 5))\n",
        ),
        in_test(
            judge="    expected = torch.tensor([[0.1, 0.2], [0.3, 0.4]])\n"
            "    torch.testing.assert_close(out3, expected)\n"
        ),
        in_forward("        return torch.tensor([0.1, 0.2, 0.3, 0.4])\n"),
        in_forward("        if x.sum().item() == 3.7251:\n            return x\n        return -x\n"),
        in_forward("        if torch.equal(x, torch.tensor([1, 2, 3, 4])):\n            return x\n        return -x\n"),
    ),
    good=(
        in_test("    tokens = torch.tensor([[1, 2, 3, 4]])\n    out1, out3 = ref_fp32(tokens), target(tokens)\n"),
        in_forward("        return torch.tensor([self.a, self.b, 1.0, 2.0]) * x\n"),
        in_forward("        if x.shape[1] == 1:\n            return x\n        return -x\n"),
    ),
)
