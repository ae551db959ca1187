"""Weights that may be missing without anybody noticing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule, keywords, literal

_IGNORING = frozenset({"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """`strict=False`, size mismatches ignored, and lists of keys that may be missing."""
    soft = Severity.WARNING if module.role is Role.PORT else None
    for call in module.calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = keywords(module, call)
        strict = given.get("strict")
        if name == "load_state_dict":
            strict = strict if strict is not None else call.args[1] if len(call.args) > 1 else None
            if strict is not None and not _checked(module, call) and literal(strict) is not True:
                yield Hit(call, "loads weights with strict off: what is missing stays as it was drawn", soft)
        elif name in ("load_model", "load_weights") and strict is not None and literal(strict) is False:
            yield Hit(call, "loads weights with strict off: what is missing stays as it was drawn", soft)
        if literal(given.get("ignore_mismatched_sizes")) is True:
            yield Hit(call, "weights of another size are dropped silently", soft)
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                if name in _IGNORING and not (isinstance(node.value, ast.List) and not node.value.elts):
                    yield Hit(node, f"{name} hides missing weights", soft)


def _checked(module: ParsedModule, call: ast.Call) -> bool:
    """Whether what is missing is kept and looked at: bound to names that are read again, or asserted."""
    parent = module.parents.get(call)
    if isinstance(parent, ast.Attribute):
        parent = module.parents.get(parent)
    if not isinstance(parent, ast.Assign):
        return isinstance(parent, (ast.Compare, ast.Assert, ast.Return))
    names = {item.id for target in parent.targets for item in ast.walk(target) if isinstance(item, ast.Name)}
    function = module.function_of(call) or module.tree
    for node in ast.walk(function):
        if isinstance(node, (ast.Assert, ast.If)):
            tested = {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}
            stops = isinstance(node, ast.Assert) or any(isinstance(item, ast.Raise) for item in ast.walk(node))
            if names & tested and stops:
                return True
    return False


RULE = Rule(
    id="not-strict",
    severity=Severity.ERROR,
    title="missing weights are ignored",
    why="A weight that is not loaded keeps its random value on one side, or the same one on both.",
    remedy="Load with strict on, or assert that missing and unexpected keys are those you can name.",
    check=check,
    bad=(
        in_test("    target.load_state_dict(ref_fp32.state_dict(), strict=False)\n"),
        in_test("    target.load_state_dict(ref_fp32.state_dict(), False)\n"),
        in_test("    loose = False\n    missing, _ = target.load_state_dict({}, strict=loose)\n    print(missing)\n"),
        in_forward("        self.inner.load_state_dict(self.weights, strict=False)\n        return x\n"),
    ),
    good=(
        in_test("    target.load_state_dict(ref_fp32.state_dict())\n"),
        in_test("    target.load_state_dict(ref_fp32.state_dict(), strict=True)\n"),
        in_test(
            "    missing, extra = target.load_state_dict({}, strict=False)\n    assert not missing and not extra\n"
        ),
    ),
)
