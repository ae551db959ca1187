"""Where a test's reference comes from."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, made_here, on_port_side, on_reference_side
from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.names import hf_kind
from equiport.audit.queries import Comparison, comparisons
from equiport.audit.rules.frame import PORT as PORT_FILE
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule


def check(module: ParsedModule) -> Iterator[Hit]:
    """A reference that is defined in the work folder, made of the port's code, or not the source's at all."""
    if module.role in (Role.TEST, Role.SUPPORT):
        for node in module.classes:
            bases = [name for base in node.bases for name in module.dotted(base) if hf_kind(name) in ("leaf", "block")]
            own = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            if bases and {"forward", "__call__", "__getattribute__"} & set(own):
                yield Hit(node, f"{node.name} changes the forward of {bases[0]}")
    if module.role is not Role.TEST:
        return
    for found in comparisons(module):
        if found.kind in ("block", "tensors"):
            reference = _reference(found)
            if reference is not None:
                yield from _fault(module, found.call, reference)
        elif found.kind == "asserting" and len(found.sides) == 2:
            yield from _either(module, found)


def _reference(found: Comparison) -> ast.expr | None:
    if found.kind == "tensors":
        return found.sides[0] if found.sides else None
    given = {item.arg: item.value for item in found.call.keywords}
    if "pytorch_block_class" in given:
        return given["pytorch_block_class"]
    return found.call.args[1] if len(found.call.args) > 1 else None


def _fault(module: ParsedModule, call: ast.Call, reference: ast.expr) -> Iterator[Hit]:
    origins = module.flow.origins(reference)
    if on_reference_side(origins):
        return
    here = made_here(origins)
    if here:
        yield Hit(call, f"the reference is {', '.join(here[:2])}, which lies in the work folder")
    elif PORT in origins:
        yield Hit(call, "the reference is made of the port's own code")
    else:
        yield Hit(call, "the reference is computed by the test itself, not by the source's class")


def _either(module: ParsedModule, found: Comparison) -> Iterator[Hit]:
    """An assert on two tensors, the order unknown: one is the port's, the other must be the source's."""
    sides = [module.flow.origins(side) for side in found.sides]
    for one, other in (sides, sides[::-1]):
        if (
            PORT in one
            and on_port_side(one)
            and not on_reference_side(other)
            and not on_reference_side(one - {"unknown"})
        ):
            here = made_here(other)
            if here:
                yield Hit(found.call, f"the reference is {', '.join(here[:2])}, which lies in the work folder")
                return


_LOCAL = "from torch import nn\n\n\nclass Expected(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
_BLOCK = "    test_block_correctness(NeuronMLP, {reference}, {{}}, hidden_size=64)\n"

RULE = Rule(
    id="reference-in-workspace",
    severity=Severity.ERROR,
    title="the reference is not the source's own code",
    why="A reference from the work folder, or one that shares the port's code, makes the test circular.",
    remedy="Import the source class directly from its original file, outside the work folder.",
    check=check,
    bad=(
        in_test(head="\n\nclass Source(LlamaMLP):\n    def forward(self, x):\n        return x\n"),
        in_test(run="", judge=_BLOCK.format(reference="Expected"), head=_LOCAL),
        Sample(
            "from block_testing_utils import test_block_correctness as check\nfrom nxdi_block import NeuronMLP\n"
            "from original import PyTorchBlock as Source\n\ndef test_mlp():\n    check(NeuronMLP, Source, {})\n",
            "test_block.py",
            {"nxdi_block.py": PORT_FILE, "original.py": _LOCAL + "\n\nclass PyTorchBlock(Expected):\n    pass\n"},
        ),
        Sample(
            "from block_testing_utils import test_block_correctness\nfrom nxdi_block import NeuronMLP, plain_mlp\n"
            "\ndef test_mlp():\n"
            "    test_block_correctness(NeuronMLP, pytorch_block_class=plain_mlp, weight_mapping={})\n",
            "test_block.py",
            {"nxdi_block.py": PORT_FILE},
        ),
        in_test(
            "    out1 = x @ x.transpose(-1, -2)\n",
            run="    x = torch.randn(2, 4)\n    out2 = out3 = NeuronMLP(CONFIG)(x)\n",
        ),
    ),
    good=(
        in_test(),
        in_test(run="", judge=_BLOCK.format(reference="LlamaMLP")),
        in_test(run="", judge=_BLOCK.format(reference="lambda: LlamaMLP(CONFIG)")),
        Sample(
            "from block_testing_utils import test_block_correctness\nfrom modeling_custom import CustomMLP\n"
            "from nxdi_block import NeuronMLP\n\ndef test_mlp():\n"
            "    test_block_correctness(NeuronMLP, CustomMLP, {})\n",
            "test_block.py",
            {"nxdi_block.py": PORT_FILE},
        ),
    ),
)
