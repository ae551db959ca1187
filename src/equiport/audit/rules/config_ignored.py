"""Configs that are overridden or never read."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import FunctionNode, ParsedModule, literal, parameters

#: Keys that decide what is computed, and that a port takes as they are.
_KEYS = frozenset({
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rope_theta", "rotary_base", "rope_scaling",
    "partial_rotary_factor", "rotary_pct", "hidden_act", "hidden_activation", "sliding_window", "layer_types",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "residual_multiplier", "embedding_multiplier", "logits_scaling", "logit_scale", "num_experts_per_tok",
    "norm_topk_prob", "attention_bias", "mlp_bias", "tie_word_embeddings", "clip_qkv", "no_rope_layers",
})  # fmt: skip


def check(module: ParsedModule) -> Iterator[Hit]:
    """Literals that take the place of a config's key without a question; configs that a class takes for nothing."""
    if module.role is not Role.PORT:
        return
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in _KEYS and _is_config(module, target.value):
                    yield from _overridden(module, node, target.attr, node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            name = literal(node.args[1])
            if isinstance(name, str) and name in _KEYS and _is_config(module, node.args[0]):
                yield from _overridden(module, node, name, node.args[2])
    for function in module.functions:
        owner = module.class_of(function)
        if function.name != "__init__" or owner is None or owner.name.endswith("Config"):
            continue
        if "config" in parameters(function) and _builds(module, function) and not _reads(function, "config"):
            yield Hit(function, f"{owner.name} takes a config, builds its parts, and reads nothing of it")


def _is_config(module: ParsedModule, node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name == "self":
        return False
    return ("conf" in name.lower() or "cfg" in name.lower()) and "neuron_config" not in ast.unparse(node)


def _overridden(module: ParsedModule, at: ast.AST, name: str, value: ast.expr) -> Iterator[Hit]:
    constant = isinstance(value, (ast.Constant, ast.List, ast.Tuple, ast.Dict)) or literal(value) is not None
    if constant and not _guarded(module, at, name):
        yield Hit(at, f"{name} of the config is overridden by {ast.unparse(value)[:40]}")


def _guarded(module: ParsedModule, at: ast.AST, name: str) -> bool:
    """Inside an `if` that asks for this very key, or in a function that fills in what is missing."""
    for outer in module.around(at):
        if isinstance(outer, ast.If) and name in ast.unparse(outer.test):
            return True
        if isinstance(outer, ast.ExceptHandler):
            return True
    return False


def _builds(module: ParsedModule, function: FunctionNode) -> bool:
    """Makes at least one part from numbers alone."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            numbers = [literal(item) for item in node.value.args]
            attribute = isinstance(node.targets[0], ast.Attribute)
            if attribute and sum(isinstance(item, int) and not isinstance(item, bool) for item in numbers) >= 2:
                return True
    return False


def _reads(function: FunctionNode, name: str) -> bool:
    return any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(function))


def _made(text: str) -> str:
    return f"    def __init__(self, config):\n        super().__init__()\n{text}"


RULE = Rule(
    id="config-ignored",
    severity=Severity.ERROR,
    title="the config's values are overridden or never read",
    why="The port is then right for one checkpoint, or for the tiny one it was tested with.",
    remedy="Read the key; where a config may lack it, fill in the source's own default and nothing else.",
    check=check,
    bad=(
        in_forward("        return x\n", body=_made("        config.rms_norm_eps = 1e-6\n        self.c = config\n")),
        in_forward("        return x\n", body=_made('        setattr(config, "rope_theta", 10000.0)\n')),
        in_forward("        return x\n", body=_made("        config.sliding_window = None\n        self.c = config\n")),
        in_forward(
            "        return x\n", body=_made("        self.up = ColumnParallelLinear(2048, 8192, bias=False)\n")
        ),
    ),
    good=(
        in_forward(
            "        return x\n",
            body=_made(
                "        if not hasattr(config, 'rope_theta'):\n            config.rope_theta = 10000.0\n"
                "        self.up = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size)\n"
            ),
        ),
        in_forward("        return x\n", body=_made("        self.eps = config.rms_norm_eps\n")),
        in_forward(
            "        return x\n",
            head="\n\nclass XInferenceConfig:\n    def add_derived_config(self):\n"
            "        self.num_cores_per_group = 1\n        self.tie_word_embeddings = False\n",
        ),
    ),
)
