"""Leaf classes that the port borrows from transformers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.names import hf_kind
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import ParsedModule, join_dotted


def check(module: ParsedModule) -> Iterator[Hit]:
    """Norms, activations and rotary tables imported by the port."""
    if module.role is not Role.PORT:
        return
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = join_dotted("." * node.level + (node.module or ""), alias.name)
                # activations are the same functions on every device
                if hf_kind(name) == "leaf" and not alias.name.startswith(("ACT2", "get_activation")):
                    yield Hit(node, f"{alias.name} is the reference's class: the device's own one is not tested here")


_LEAF = "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n"

RULE = Rule(
    id="borrowed-leaf",
    severity=Severity.NOTE,
    title="a leaf class is borrowed from the reference",
    why="On a CPU both sides run the same code for it; the class that runs on a device stays untested.",
    remedy="Test the device's class against its formula too (a test of both the CPU and the device class).",
    check=check,
    bad=(
        in_forward("        return LlamaRMSNorm(4)(x)\n", head=_LEAF),
        in_forward(
            "        return R(4)(x)\n", head="from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm as R\n"
        ),
    ),
    good=(
        in_forward("        return ACT2FN['silu'](x)\n", head="from transformers.activations import ACT2FN\n"),
        in_forward("        return x\n", head="from transformers import PretrainedConfig\n"),
    ),
)
