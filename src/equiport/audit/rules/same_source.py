"""Both sides are one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, SOURCE_BLOCK, on_port_side
from equiport.audit.identity import same_value
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import Comparison, comparisons
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule


def check(module: ParsedModule) -> Iterator[Hit]:
    """The port's side is the reference's value, comes from the reference alone, or the two blocks are one class."""
    if module.role is not Role.TEST:
        return
    for found in comparisons(module):
        if found.kind not in ("tensors", "asserting", "predicate", "block") or len(found.sides) < 2:
            continue
        port = _port_side(found)
        others = [side for side in found.sides if side is not port]
        same = [side for side in others if same_value(module.flow, side, port)]
        if same:
            yield Hit(found.call, f"{_text(port)} is the same value as {_text(same[0])}")
        elif found.kind in ("tensors", "block") and not on_port_side(module.flow.origins(port)):
            yield Hit(found.call, f"no data of the port reaches {_text(port)}")
        elif found.kind == "block" and SOURCE_BLOCK in module.flow.origins(port):
            yield Hit(found.call, f"{_text(port)} contains the source's own code")
        elif found.kind == "block" and any(_one_class(module, side, port) for side in others):
            yield Hit(found.call, "both blocks are one class")


def _port_side(found: Comparison) -> ast.expr:
    given = {item.arg: item.value for item in found.call.keywords}
    for name in ("target", "neuron_block_class"):
        if name in given:
            return given[name]
    if found.kind == "block":
        return found.sides[0]
    return found.sides[2] if found.kind == "tensors" and len(found.sides) > 2 else found.sides[1]


def _one_class(module: ParsedModule, one: ast.expr, other: ast.expr) -> bool:
    return bool(module.dotted(one) & module.dotted(other)) or (
        PORT in module.flow.origins(one) and ast.dump(one) == ast.dump(other)
    )


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) < 50 else text[:47] + "..."


def _judged(sides: str) -> str:
    return f'    assert check_3tensor_result(compare_3tensors({sides}), "m", 1.2)\n'


RULE = Rule(
    id="same-source",
    severity=Severity.ERROR,
    title="both sides come from one source",
    why="What is compared with itself is always equal.",
    remedy="Run the source's class and the port's class each on the inputs, and compare what they gave.",
    check=check,
    bad=(
        in_test(judge=_judged("out1, out2, out2.clone()")),
        in_test(judge=_judged("out1, out2, out2 + 0")),
        in_test("    out4 = out2\n    out5 = out4.detach().float()\n", judge=_judged("out1, out2, target=out5")),
        in_test("    out4 = ref_bf16(x.bfloat16())\n", judge=_judged("out1, out2, out4")),
        in_test(judge="    torch.testing.assert_close(out3.clone(), out3)\n"),
        in_test(run="", judge="    test_block_correctness(LlamaMLP, LlamaMLP, {})\n"),
        in_test(
            run="",
            judge="    test_block_correctness(Both, LlamaMLP, {})\n",
            head="\n\nclass Both(torch.nn.Module):\n    def __init__(self, config):\n        super().__init__()\n"
            "        self.port, self.run = NeuronMLP(config), LlamaMLP(config)\n\n    def forward(self, x):\n"
            "        return self.run(x)\n",
        ),
        in_test(run="", judge="    test_block_correctness(NeuronMLP, NeuronMLP, {})\n"),
    ),
    good=(
        in_test(),
        in_test(judge=_judged("out1[0], out2[0], out3[0]")),
        in_test("    outs = [ref_fp32(x), ref_bf16(x), target(x)]\n", judge=_judged("outs[0], outs[1], outs[2]")),
        in_test("    a, b, c = (m(x) for m in (ref_fp32, ref_bf16, target))\n", judge=_judged("a, b, c")),
        in_test(run="", judge="    test_block_correctness(NeuronMLP, LlamaMLP, {})\n"),
    ),
)
