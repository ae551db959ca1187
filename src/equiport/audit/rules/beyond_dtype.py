"""Precision beyond what was declared."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions, in_any
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule

_DOUBLE = frozenset({"torch.float64", "torch.double", "numpy.float64"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """float64 in what the port computes; a port that a test casts up before it runs."""
    if module.role is Role.PORT:
        computing = compute_functions(module)
        for node in module.nodes:
            if (
                (
                    isinstance(node, (ast.Name, ast.Attribute))
                    and module.is_any(node, _DOUBLE)
                    and in_any(module, node, computing)
                )
                or _doubles(node)
                and in_any(module, node, computing)
            ):
                yield Hit(node, "computes in float64, which the device does not have")
    elif module.role is Role.TEST:
        for call in module.calls:
            sets = module.dotted(call.func) & {"torch.set_default_dtype", "torch.set_default_tensor_type"}
            if sets and any(module.is_any(item, _DOUBLE) for item in call.args):
                yield Hit(call, "the whole test runs in float64")


def _doubles(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "double" and not node.args


RULE = Rule(
    id="beyond-dtype",
    severity=Severity.WARNING,
    title="more precision than declared",
    why="The device rounds where the tested code does not.",
    remedy="Compute in the declared dtype, or float32 where the source does.",
    check=check,
    bad=(
        in_forward("        return (x.double() * 2).to(x.dtype)\n"),
        in_forward("        return x.to(torch.float64)\n"),
        in_test("    torch.set_default_dtype(torch.float64)\n"),
    ),
    good=(
        in_forward("        return (x.float() * 2).to(x.dtype)\n"),
        in_test("    worst = (out1.double() - out3.double()).abs().max()\n    assert worst < 1e-4\n"),
    ),
)
