"""A comparison that was edited between the comparator and the verdict."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import MEASURED
from equiport.audit.identity import root_of
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.names import VERDICTS
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule

_MAKING = frozenset({
    "dataclasses.replace", "copy.replace", "equiport.compare.Comparison", "tensor_compare.Comparison",
    "equiport.compare.comparison.Comparison", "types.SimpleNamespace",
})  # fmt: skip
_WRITING = frozenset({"equiport.compare.append_record", "equiport.compare.records.append_record"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """What is judged was made or changed by the test; records that the test writes itself."""
    if module.role is not Role.TEST:
        return
    for call in module.calls:
        sets = getattr(call.func, "attr", "") == "__setattr__" or getattr(call.func, "id", "") == "setattr"
        if module.is_any(call.func, _WRITING):
            yield Hit(call, "writes a record that the comparator did not make")
        elif module.is_any(call.func, VERDICTS) and call.args:
            root = root_of(module.flow, call.args[0])
            if isinstance(root, ast.Call) and module.is_any(root.func, _MAKING):
                yield Hit(call, "judges a comparison that the test made")
        elif sets and call.args and MEASURED in module.flow.origins(call.args[0]):
            yield Hit(call, "changes what the comparator measured")
    for node in module.nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and MEASURED in module.flow.origins(target.value):
                    yield Hit(node, "changes what the comparator measured")


_RESULT = "    result = compare_3tensors(out1, out2, out3)\n"
_ASSERT = '    assert check_3tensor_result(result, "mlp", 1.2)\n'

RULE = Rule(
    id="edited-comparison",
    severity=Severity.ERROR,
    title="a comparison is edited before it is judged",
    why="The verdict is then about the test's numbers, not the comparator's.",
    remedy="Give check_3tensor_result what compare_3tensors returned.",
    check=check,
    bad=(
        in_test(judge=_RESULT + "    import dataclasses as d\n    result = d.replace(result, r_ratio=1.0)\n" + _ASSERT),
        in_test(judge=_RESULT + '    object.__setattr__(result, "r_ratio", 1.0)\n' + _ASSERT),
        in_test(judge=_RESULT + "    result.r_ratio = 1.0\n" + _ASSERT),
    ),
    good=(in_test(), in_test(judge=_RESULT + "    print(result.r_ratio)\n" + _ASSERT)),
)
