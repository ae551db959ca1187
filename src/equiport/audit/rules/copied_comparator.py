"""A comparator that is not the toolkit's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from equiport.audit.model import Hit, Rule, Sample, Severity
from equiport.audit.names import TOOLKIT_FILES, TOOLKIT_FUNCTIONS
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule


def check(module: ParsedModule) -> Iterator[Hit]:
    """Functions and classes named like the toolkit's, and copies of its files that differ from it."""
    if module.path.name in TOOLKIT_FILES:
        if ast.dump(module.tree) != _own(module.path.name):
            yield Hit(1, f"{module.path.name} differs from the toolkit's own")
        return
    for node in (*module.functions, *module.classes):
        if node.name in TOOLKIT_FUNCTIONS:
            yield Hit(node, f"{node.name} is defined here under the name of the toolkit's")
    for name in module.nodes:
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in TOOLKIT_FUNCTIONS:
            yield Hit(name, f"{name.id} is given another meaning")


@lru_cache(maxsize=4)
def _own(name: str) -> str:
    from equiport.content import content_dir

    return ast.dump(ast.parse((content_dir("scripts") / name).read_text(encoding="utf-8")))


RULE = Rule(
    id="copied-comparator",
    severity=Severity.ERROR,
    title="a comparator that is not the toolkit's own",
    why="Whoever writes the judge decides the judgement.",
    remedy="Import the comparator from equiport.compare, tensor_compare or block_testing_utils as they ship.",
    check=check,
    bad=(
        in_test(head="\n\ndef check_3tensor_result(result, name, ratio):\n    return True\n"),
        in_test(head="\ncompare_3tensors = lambda a, b, c: a\n"),
        Sample("def compare_3tensors(a, b, c):\n    return 0.0\n", "tensor_compare.py"),
        Sample("def test_block_correctness(*a, **k):\n    return True\n", "block_testing_utils.py"),
        Sample("class helper:\n    def test_block_correctness(self):\n        return 1\n", "my_tools.py"),
    ),
    good=(in_test(), in_test(head="\n\ndef largest_difference(a, b):\n    return (a - b).abs().max()\n")),
)
