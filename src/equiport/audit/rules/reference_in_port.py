"""The port computes with the reference's own blocks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.names import hf_kind
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import FunctionNode, ParsedModule

#: Where a port loads the source model as a whole: for its weights, or as the reference.
_LOADING = (
    "load_hf_model",
    "load_state_dict",
    "get_state_dict",
    "main",
    "convert",
    "reference",
    "from_pretrained",
    "_hf_",
)


def check(module: ParsedModule) -> Iterator[Hit]:
    """Blocks, models and forwards of transformers that are called, inherited or kept, outside of loading weights."""
    if module.role is not Role.PORT:
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) or isinstance(getattr(node, "ctx", None), ast.Load):
            blocks = sorted(name for name in module.dotted(node) if hf_kind(name) == "block")
            if blocks and not _passive(module, node):
                yield Hit(node, f"uses {blocks[0]}, which computes a part of the reference")


def _passive(module: ParsedModule, node: ast.AST) -> bool:
    """Annotations, type tests, the inner part of a longer name, and code that loads the source's weights."""
    parent = module.parents.get(node)
    longer = isinstance(parent, ast.Attribute) and hf_kind(next(iter(module.dotted(parent)), ""))
    if longer and isinstance(parent, ast.Attribute) and parent.attr not in ("from_pretrained", "from_config"):
        return _passive(module, parent)
    if isinstance(parent, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops):
        return True
    if isinstance(parent, (ast.arg, ast.AnnAssign)) and node is getattr(parent, "annotation", None):
        return True
    if (
        isinstance(parent, ast.Call)
        and isinstance(parent.func, ast.Name)
        and parent.func.id in ("isinstance", "issubclass")
    ):
        return True
    for outer in module.around(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if outer.returns is not None and any(item is node for item in ast.walk(outer.returns)):
                return True
            if _loads(outer):
                return True
        if isinstance(outer, ast.arg):
            return True
    return _main_guard(module, node)


def _loads(function: FunctionNode) -> bool:
    return any(part in function.name for part in _LOADING)


def _main_guard(module: ParsedModule, node: ast.AST) -> bool:
    return any(
        isinstance(outer, ast.If)
        and any(isinstance(item, ast.Name) and item.id == "__name__" for item in ast.walk(outer.test))
        for outer in module.around(node)
    )


_IMPORT = "from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm\n"
_INIT = "    def __init__(self, config):\n        super().__init__()\n        self.inner = {what}(config)\n"

RULE = Rule(
    id="reference-in-port",
    severity=Severity.ERROR,
    title="the port computes with the reference's own code",
    why="A port that calls the reference agrees with it on a CPU and proves nothing of what will run on a device.",
    remedy="Write the block with the stack's primitives; leaves (norms, activations, rotary tables) may be borrowed.",
    check=check,
    bad=(
        in_forward("        return self.inner(x)\n", head=_IMPORT, body=_INIT.format(what="LlamaMLP")),
        in_forward(
            "        return self.inner(x)\n", head="import transformers as tf\n",
            body=_INIT.format(what="tf.AutoModelForCausalLM.from_config"),
        ),
        in_forward(
            "        return self.inner(x)\n", head="import transformers\n",
            body=_INIT.format(what='getattr(transformers, "LlamaForCausalLM")'),
        ),
        in_forward("        return x\n", head=_IMPORT + "\n\nclass NeuronLayer(LlamaDecoderLayer):\n    pass\n"),
        in_forward("        return LlamaMLP.forward(self, x)\n", head=_IMPORT),
    ),
    good=(
        in_forward("        return self.inner(x)\n", head=_IMPORT, body=_INIT.format(what="LlamaRMSNorm")),
        in_forward(
            "        return x\n",
            head="from transformers import LlamaForCausalLM, PretrainedConfig\n"
            "from transformers.activations import ACT2FN\n",
            body="    @staticmethod\n    def load_hf_model(path, **kwargs) -> LlamaForCausalLM:\n"
            "        return LlamaForCausalLM.from_pretrained(path, **kwargs)\n",
        ),
    ),
)  # fmt: skip
