"""Every family's decisive facets, read by rule from its own class: one row a family and switch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from equiport.port.fingerprint import Fingerprint, RopeFacets
from equiport.port.fingerprint_reader import fingerprint

LAYERS = 4


@dataclass(frozen=True)
class Row:
    """A family, the keys set beside its config class's defaults, and what must be found."""

    model_type: str
    wanted: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    label: str = ""


# transformers 4 itself cannot build these: a norm without bias is initialised by it, a factor is read from the meta
# device, an absent rope_scaling is indexed
NOT_IN_FOUR = {("stablelm", "qk_layernorm"), ("apertus", ""), ("mllama", "")}


def write_config(folder: Path, model_type: str, **keys: Any) -> Path:
    """A folder with a config.json alone: the class's defaults with few layers, and `keys`."""
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"the installed transformers has no {model_type}")
    if transformers.__version__.startswith("4.") and any(
        model_type == name and (not key or key in keys) for name, key in NOT_IN_FOUR
    ):
        pytest.skip(f"transformers {transformers.__version__} cannot build this {model_type}")
    config = AutoConfig.for_model(model_type, **{"num_hidden_layers": LAYERS, **keys})
    # newer config classes take a given list as it is
    values = {key: value for key, value in config.to_dict().items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**values, **keys, "model_type": model_type}))
    return folder


def rope(f: Fingerprint) -> RopeFacets:
    return f.ropes[0]


# what a row may ask for
FACETS: dict[str, Callable[[Fingerprint], Any]] = {
    "residual": lambda f: f.residual,
    "route": lambda f: f.route,
    "norm": lambda f: f.norms[0].kind,
    "offset": lambda f: f.norms[0].weight_offset,
    "norm_weight": lambda f: f.norms[0].has_weight,
    "norm_bias": lambda f: f.norms[0].has_bias,
    "norm_fp32": lambda f: f.norms[0].multiply_in_fp32,
    "eps": lambda f: f.norms[0].eps,
    "layer_norms": lambda f: len({n for n in vars(f.layer_norms).values() if n}),
    "layout": lambda f: f.attention.qkv_layout,
    "heads": lambda f: (f.attention.num_heads, f.attention.num_kv_heads, f.attention.head_dim),
    "biases": lambda f: "".join(n for n in "qkvo" if getattr(f.attention, f"{n}_bias")),
    "scale": lambda f: f.attention.scale,
    "scale_source": lambda f: f.attention.scale_source,
    "softcap": lambda f: f.attention.softcap,
    "clip": lambda f: f.attention.clip_qkv,
    "sinks": lambda f: f.attention.sinks_name,
    "alibi": lambda f: f.attention.alibi,
    "latent": lambda f: f.attention.latent,
    "extras": lambda f: f.attention.extras,
    "qk_norm": lambda f: f.attention.qk_norm and (f.attention.qk_norm.width, f.attention.qk_norm.place),
    "qk_offset": lambda f: f.attention.qk_norm.norm.weight_offset,
    "rope": lambda f: [r.kind for r in f.ropes],
    "theta": lambda f: sorted(r.theta for r in f.ropes),
    "interleaved": lambda f: rope(f).interleaved,
    "rotary_share": lambda f: rope(f).rotary_dim / f.attention.head_dim,
    "still": lambda f: [layer.index for layer in f.layers if not layer.rope],
    "windows": lambda f: [layer.window for layer in f.layers],
    "mlp": lambda f: (f.mlp.kind, f.mlp.layout, f.mlp.activation),
    "mlp_bias": lambda f: (f.mlp.up_bias, f.mlp.down_bias),
    "learned_activation": lambda f: len(f.mlp.activation_parameters),
    "moe": lambda f: f.moe.router_kind,
    "experts": lambda f: (f.moe.num_experts, f.moe.experts_per_token),
    "shared": lambda f: bool(f.moe.shared_expert),
    "correction": lambda f: f.moe.correction_bias,
    "moe_layers": lambda f: f.moe.layers,
    "embedding": lambda f: (f.multipliers.embedding, f.multipliers.embedding_source, f.multipliers.embedding_rounded),
    "residual_factor": lambda f: f.multipliers.residual,
    "logits": lambda f: f.multipliers.logits,
    "logits_softcap": lambda f: f.logits_softcap,
    "tied": lambda f: f.tied_embeddings,
    "head_bias": lambda f: f.lm_head_bias,
    "positions": lambda f: (f.learned_positions, f.position_offset),
    "questions": lambda f: sorted(q.id for q in f.questions),
    "unsupported": lambda f: " ".join(f.unsupported),
}
GQA = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
DENSE: tuple[Row, ...] = (
    Row("llama", {"residual": "pre_norm", "norm": "rmsnorm", "offset": 0.0, "norm_fp32": False, "biases": "",
        "rope": ["default"], "interleaved": False, "scale_source": "head_dim", "mlp": ("gated", "separate", "silu"),
        "qk_norm": None, "still": [], "windows": [None] * LAYERS, "heads": (32, 8, 96), "scale": 96**-0.5},
        {**GQA, "head_dim": 96}),
    Row("llama", {"biases": "qkvo", "mlp_bias": (True, True)}, {"attention_bias": True, "mlp_bias": True}, "biases"),
    Row("qwen2", {"biases": "qkv", "windows": [None] * LAYERS}),
    Row("qwen2", {"windows": [None, None, 64, 64]}, {"use_sliding_window": True, "sliding_window": 64,
        "max_window_layers": 2, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "window"),
    Row("qwen3", {"qk_norm": ("head", "before_rope"), "heads": (32, 8, 128), "biases": ""},
        {**GQA, "hidden_size": 2048}),
    Row("mistral", {"windows": [4096] * LAYERS}),
    Row("mistral", {"windows": [None] * LAYERS}, {"sliding_window": None}, "full"),
    Row("gemma", {"offset": 1.0, "norm_fp32": True, "embedding": (3072**0.5, "sqrt(hidden_size)", True), "tied": True,
        "mlp": ("gated", "separate", "gelu_pytorch_tanh")}),
    Row("gemma2", {"residual": "sandwich", "layer_norms": 4, "offset": 1.0, "softcap": 50.0, "logits_softcap": 30.0,
        "scale": 144**-0.5, "scale_source": "query_pre_attn_scalar", "windows": [4096, None, 4096, None]},
        {"query_pre_attn_scalar": 144}),
    Row("gemma3_text", {"residual": "sandwich", "qk_norm": ("head", "before_rope"), "qk_offset": 1.0, "softcap": None,
        "theta": [10000.0, 1000000.0], "windows": [4096] * 5 + [None]}, {"num_hidden_layers": 6}),
    Row("phi", {"residual": "parallel_one_norm", "norm": "layernorm", "norm_bias": True, "rotary_share": 0.5,
        "head_bias": True, "mlp": ("ungated", "separate", "gelu_new"), "biases": "qkvo"}),
    Row("phi3", {"layout": "concat", "mlp": ("gated", "gate_first", "silu"), "rope": ["default"]}),
    Row("glm", {"interleaved": True, "rotary_share": 0.5, "biases": "qkv", "mlp": ("gated", "gate_first", "silu"),
        "residual": "pre_norm"}),
    Row("glm4", {"interleaved": True, "rotary_share": 0.5, "biases": "qkv", "residual": "sandwich", "layer_norms": 4,
        "mlp": ("gated", "gate_first", "silu")}),
    Row("olmo", {"norm": "layernorm", "norm_weight": False, "clip": 8.0, "residual": "pre_norm"}, {"clip_qkv": 8.0}),
    Row("olmo2", {"residual": "post_norm", "qk_norm": ("full", "before_rope"), "norm_fp32": True}),
    Row("olmo3", {"residual": "post_norm", "qk_norm": ("full", "before_rope"), "windows": [4096] * 3 + [None]}),
    Row("granite", {"embedding": (12.0, "embedding_multiplier", False), "scale": 1 / 128, "residual_factor": 0.22,
        "scale_source": "attention_multiplier", "logits": 1 / 8}, {"embedding_multiplier": 12.0,
        "attention_multiplier": 1 / 128, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    Row("cohere", {"norm": "layernorm", "norm_bias": False, "interleaved": True, "residual": "parallel_one_norm",
        "logits": 0.0625, "tied": True, "qk_norm": None}),
    Row("cohere", {"qk_norm": ("per_head_weights", "before_rope")}, {"use_qk_norm": True}, "qk_norm"),
    Row("cohere2", {"interleaved": True, "residual": "parallel_one_norm", "still": [3], "logits": 0.0625,
        "windows": [4096, 4096, 4096, None]}),
    Row("starcoder2", {"norm": "layernorm", "norm_bias": True, "mlp": ("ungated", "separate", "gelu_pytorch_tanh"),
        "biases": "qkvo", "mlp_bias": (True, True)}),
    Row("stablelm", {"norm": "layernorm", "rotary_share": 0.25, "residual": "pre_norm", "biases": ""}),
    Row("stablelm", {"qk_norm": ("per_head_weights", "before_rope"), "residual": "parallel_one_norm", "biases": "qkv"},
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}, "parallel"),
    Row("falcon", {"layout": "concat", "heads": (71, 1, 64), "residual": "parallel_one_norm",
        "mlp": ("ungated", "separate", "gelu")}),
    Row("falcon", {"layout": "grouped", "heads": (64, 8, 64), "residual": "parallel_two_norms"},
        {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 4096}, "new"),
    Row("falcon", {"layout": "per_head", "heads": (64, 64, 64), "residual": "pre_norm", "biases": "qkvo"},
        {"multi_query": False, "parallel_attn": False, "bias": True, "num_attention_heads": 64, "num_kv_heads": 64,
         "hidden_size": 4096}, "mha"),
    Row("gpt_neox", {"layout": "per_head", "residual": "parallel_two_norms", "rotary_share": 0.25, "tied": False,
        "mlp": ("ungated", "separate", "gelu")}),
    Row("gpt_neox", {"residual": "pre_norm"}, {"use_parallel_residual": False}, "sequential"),
    Row("smollm3", {"still": [3], "rope": ["default"]}),
    Row("exaone4", {"residual": "post_norm", "qk_norm": ("head", "before_rope"), "still": [3],
        "windows": [4096, 4096, 4096, None]}),
    Row("hunyuan_v1_dense", {"qk_norm": ("head", "after_rope")}, {"head_dim": 128}),
    Row("ernie4_5", {"interleaved": True, "biases": ""}),
    Row("seed_oss", {"biases": "qkv", "heads": (80, 8, 128)}),
    Row("apertus", {"mlp": ("ungated", "separate", "xielu"), "qk_norm": ("head", "before_rope"), "rope": ["llama3"]}),
    Row("arcee", {"mlp": ("ungated", "separate", "relu2")}),
    Row("nemotron", {"norm": "layernorm", "offset": 1.0, "norm_bias": True, "rotary_share": 0.5,
        "mlp": ("ungated", "separate", "relu2")}, {"num_key_value_heads": 8, "head_dim": 128}),
    Row("helium", {"interleaved": True, "eps": 1e-8}),
    Row("gpt2", {"layout": "concat", "positions": (True, 0), "tied": True, "rope": [],
        "mlp": ("ungated", "separate", "gelu_new")}, {"n_layer": LAYERS}),
    Row("opt", {"positions": (True, 2), "biases": "qkvo", "mlp": ("ungated", "separate", "relu")}),
    Row("gptj", {"residual": "parallel_one_norm", "interleaved": True, "rotary_share": 0.25}, {"n_layer": LAYERS}),
    Row("llama", {"rope": ["llama3"]}, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}, "max_position_embeddings": 131072},
        "llama3"),
    Row("llama", {"rope": ["linear"]}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear"),
    Row("llama", {"rope": ["yarn"]}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 512}}, "yarn"),
)  # fmt: skip
EXPERTS: tuple[Row, ...] = (
    Row("mixtral", {"moe": "softmax_topk", "experts": (8, 2), "shared": False}),
    Row("qwen2_moe", {"moe": "softmax_topk", "experts": (60, 4), "shared": True, "biases": "qkv"}),
    Row("qwen3_moe", {"moe": "softmax_topk", "qk_norm": ("head", "before_rope"), "moe_layers": (0, 1, 3)},
        {"mlp_only_layers": [2]}),
    Row("gpt_oss", {"moe": "topk_softmax", "sinks": "sinks", "biases": "qkvo", "rope": ["yarn"],
        "windows": [128, None, 128, None]}),
    Row("olmoe", {"qk_norm": ("full", "before_rope"), "moe": "softmax_topk"}),
    Row("granitemoe", {"moe": "topk_softmax", "scale_source": "attention_multiplier"}),
    Row("deepseek_v3", {"moe": "sigmoid", "correction": True, "shared": True, "latent": True, "moe_layers": (2, 3)},
        {"first_k_dense_replace": 2, "n_routed_experts": 16, "n_group": 4, "topk_group": 2}),
    Row("minimax_m2", {"moe": "sigmoid", "correction": True, "qk_norm": ("full", "before_rope")}),
    Row("glm4_moe", {"moe": "sigmoid", "rotary_share": 20 / 42, "shared": True}),
    Row("phimoe", {"moe": "sparsemixer", "norm": "layernorm"}),
    Row("afmoe", {"moe": "sigmoid", "extras": ("gate_proj",), "residual": "sandwich"}),
)  # fmt: skip


def found_in(row: Row, folder: Path) -> tuple[Fingerprint, dict[str, Any]]:
    found = fingerprint(write_config(folder / "model", row.model_type, **row.keys))
    return found, {name: FACETS[name](found) for name in row.wanted}


def ids(rows: tuple[Row, ...]) -> list[str]:
    return [f"{row.model_type}-{row.label}".rstrip("-") for row in rows]


@pytest.mark.parametrize("row", DENSE, ids=ids(DENSE))
def test_dense_family(row: Row, tmp_path: Path) -> None:
    found, facets = found_in(row, tmp_path)
    for name, value in row.wanted.items():
        assert facets[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert found.route == "decoder"
    assert not found.unsupported
    assert [question.id for question in found.questions] == []


@pytest.mark.parametrize("row", EXPERTS, ids=ids(EXPERTS))
def test_expert_family(row: Row, tmp_path: Path) -> None:
    found, facets = found_in(row, tmp_path)
    for name, value in row.wanted.items():
        assert facets[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert found.moe is not None and found.moe.cls


@pytest.mark.parametrize(
    ("model_type", "route", "named"),
    [
        ("mamba", "recurrent", "MambaMixer"),
        ("rwkv", "recurrent", "RwkvSelfAttention"),
        ("jamba", "hybrid", "JambaMambaMixer"),
        ("falcon_h1", "hybrid", "FalconH1Mixer"),
        ("qwen3_next", "hybrid", "GatedDeltaNet"),
        ("minimax", "hybrid", "MiniMaxLightningAttention"),
        ("recurrent_gemma", "hybrid", "RecurrentGemmaRecurrentBlock"),
        ("bart", "encoder_decoder", "encoder-decoder"),
        ("t5", "encoder_decoder", "encoder-decoder"),
        ("gemma3", "multimodal", "scatter (reference: Pixtral)"),
        ("mllama", "multimodal", "cross-attention (reference: MLlama)"),
    ],
)
def test_other_routes_are_named(model_type: str, route: str, named: str, tmp_path: Path) -> None:
    keys = {"num_hidden_layers": 8} if model_type in ("jamba", "qwen3_next") else {}
    found = fingerprint(write_config(tmp_path / "model", model_type, **keys))
    assert found.route == route
    assert any(named in part for part in found.unsupported), found.unsupported
    assert found.attention is None and found.mlp is None
    assert not found.questions


def test_latent_attention_is_named(tmp_path: Path) -> None:
    found = fingerprint(write_config(tmp_path / "model", "deepseek_v3", n_routed_experts=16))
    assert found.attention is not None and found.attention.latent
    assert "kv_a_proj_with_mqa" in " ".join(found.unsupported)


def test_longrope_factor_is_the_models_own(tmp_path: Path) -> None:
    """The small model has other positions; its attention factor must not leak into the facets."""
    folder = write_config(tmp_path / "model", "phi3")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i / 64 for i in range(48)],
                         "long_factor": [1.0 + i for i in range(48)]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    found = fingerprint(folder)
    assert rope(found).kind == "longrope"
    assert rope(found).attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
    assert not found.questions
