"""Features of the model that the test switches off."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, literal

_FEATURES = frozenset({
    "sliding_window", "use_sliding_window", "layer_types", "rope_scaling", "rope_parameters", "attn_logit_softcapping",
    "final_logit_softcapping", "logit_scale", "logits_scaling", "attention_bias", "qkv_bias", "mlp_bias",
    "use_qkv_bias",
    "qk_layernorm", "use_qk_norm", "qk_norm", "partial_rotary_factor", "no_rope_layers", "tie_word_embeddings",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "query_pre_attn_scalar",
    "num_experts_per_tok",
    "rms_norm_eps", "layer_norm_eps", "attention_sink", "clip_qkv", "use_parallel_residual", "attention_chunk_size",
})  # fmt: skip
#: Smaller values of these are as good as the model's own.
_SIZES = frozenset({"sliding_window", "attention_chunk_size", "num_experts_per_tok", "layer_types", "no_rope_layers"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Fields of a config that are assigned in a test so that a feature is off or has another value."""
    if module.role is not Role.TEST:
        return
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr in _FEATURES and _config(target.value):
                    yield from _changed(node, target.attr, node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            name = literal(node.args[1])
            if isinstance(name, str) and name in _FEATURES and _config(node.args[0]):
                yield from _changed(node, name, node.args[2])
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
            for keyword in node.keywords:
                if keyword.arg in _FEATURES:
                    yield from _changed(node, keyword.arg, keyword.value)


def _config(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return "conf" in name.lower() or "cfg" in name.lower()


def _changed(at: ast.AST, name: str, value: ast.expr) -> Iterator[Hit]:
    off = isinstance(value, ast.Constant) and value.value in (None, False, 0, 1, 1.0, "")
    if off:
        yield Hit(at, f"{name} is switched off for the test")
    elif name not in _SIZES:
        yield Hit(at, f"{name} is not the model's own in this test", Severity.WARNING)


RULE = Rule(
    id="feature-disabled",
    severity=Severity.ERROR,
    title="a feature of the model is switched off for the test",
    why="A port that leaves the feature out passes then.",
    remedy="Test with the model's own config; smaller dimensions are fine, other features are not.",
    check=check,
    bad=(
        in_test("    config = ref_fp32.config\n    config.sliding_window = None\n"),
        in_test('    setattr(CONFIG, "rope_scaling", None)\n'),
        in_test(
            "    from transformers import AutoConfig\n    c = AutoConfig.from_pretrained('x', attention_bias=False)\n"
        ),
        in_test("    CONFIG.neuron_config.qk_norm = False\n    ref_fp32.config.qk_norm = False\n"),
    ),
    good=(
        in_test("    CONFIG.num_hidden_layers = 2\n    CONFIG.hidden_size = 64\n"),
        in_test("    CONFIG.neuron_config.attn_cls = NeuronMLP\n"),
    ),
)
