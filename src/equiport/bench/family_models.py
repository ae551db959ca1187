"""Tiny configs of the families that recipes serve: each layer kind, distinct dimensions, constants that bind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize

_SHARED = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "type": "longrope", "short_factor": [1.0, 1.0, 1.02, 1.05, 1.1, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 8.5],
}  # fmt: skip
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **_SHARED, **changes}


def _llama(**changes: Any) -> dict[str, Any]:
    base = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}
    return _config("llama", "LlamaForCausalLM", **{**base, **changes})


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama tied, head_dim": _llama(tie_word_embeddings=True, head_dim=12),
    "llama biases": _llama(attention_bias=True, mlp_bias=True),
    "llama linear": _llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama llama3": _llama(rope_scaling=LLAMA3),
    "llama yarn": _llama(rope_scaling=YARN),
    "qwen2": _config(
        "qwen2", "Qwen2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "qwen2 windows": _config(
        "qwen2", "Qwen2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    ),
    "qwen3": _config(
        "qwen3", "Qwen3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
        head_dim=12,
    ),
    "mistral": _config(
        "mistral", "MistralForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", sliding_window=8,
        tie_word_embeddings=False, head_dim=8,
    ),
    "granite": _config(
        "granite", "GraniteForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=True,
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=5.0,
    ),
    "olmo2": _config(
        "olmo2", "Olmo2ForCausalLM", rms_norm_eps=1e-6, rope_theta=5e5, hidden_act="silu", tie_word_embeddings=False,
    ),
    "smollm3": _config(
        "smollm3", "SmolLM3ForCausalLM", rms_norm_eps=1e-6, rope_theta=2e6, hidden_act="silu", tie_word_embeddings=True,
        no_rope_layers=[1, 0, 1], use_sliding_window=False,
    ),
    "smollm3 first without rope": _config(
        "smollm3", "SmolLM3ForCausalLM", rms_norm_eps=1e-6, rope_theta=2e6, hidden_act="silu", tie_word_embeddings=True,
        no_rope_layers=[0, 1, 1], use_sliding_window=False,
    ),
    "glm4": _config(
        "glm4", "Glm4ForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False,
        head_dim=16, partial_rotary_factor=0.5, attention_bias=True,
    ),
    "stablelm": _config(
        "stablelm", "StableLmForCausalLM", layer_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu",
        tie_word_embeddings=False, partial_rotary_factor=0.25, use_qkv_bias=True, hidden_size=96,
    ),
    "stablelm parallel, head norms": _config(
        "stablelm", "StableLmForCausalLM", layer_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", hidden_size=96,
        tie_word_embeddings=False, partial_rotary_factor=0.25, use_parallel_residual=True, qk_layernorm=True,
    ),
    "phi3": _config(
        "phi3", "Phi3ForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False,
        rope_scaling=LONG, original_max_position_embeddings=16, sliding_window=10, hidden_size=96,
    ),
    "gemma2": _config(
        "gemma2", "Gemma2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e4, hidden_activation="gelu_pytorch_tanh",
        head_dim=12, query_pre_attn_scalar=20, attn_logit_softcapping=4.0, final_logit_softcapping=3.0,
        sliding_window=8, layer_types=_LOCAL_GLOBAL, tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "gemma3_text", "Gemma3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
        hidden_activation="gelu_pytorch_tanh", head_dim=12, query_pre_attn_scalar=20, sliding_window=8,
        layer_types=_LOCAL_GLOBAL, rope_scaling={"rope_type": "linear", "factor": 4.0}, tie_word_embeddings=True,
    ),
    "gpt_neox": _config(
        "gpt_neox", "GPTNeoXForCausalLM", layer_norm_eps=1e-5, rotary_emb_base=1e4, rotary_pct=0.25, hidden_act="gelu",
        tie_word_embeddings=False, use_parallel_residual=True, hidden_size=96,
    ),
    "gpt_neox sequential": _config(
        "gpt_neox", "GPTNeoXForCausalLM", layer_norm_eps=1e-5, rotary_emb_base=1e4, rotary_pct=0.25, hidden_act="gelu",
        tie_word_embeddings=False, use_parallel_residual=False, hidden_size=96,
    ),
}  # fmt: skip


# Other switches of families that are in the table with their main configuration.
VARIANTS = (
    "llama tied, head_dim", "llama biases", "llama linear", "llama llama3", "llama yarn", "qwen2 windows",
    "smollm3 first without rope", "stablelm parallel, head norms", "gpt_neox sequential",
)  # fmt: skip


def family_names(chosen: str = "", *, variants: bool = True) -> tuple[str, ...]:
    """All names, or those of one family; with or without the variants.

    Raises:
        EquiportError: no such family.
    """
    names = tuple(name for name in FAMILIES if variants or name not in VARIANTS or name == chosen)
    found = tuple(name for name in names if not chosen or name == chosen or name.split()[0] == chosen)
    if not found:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in FAMILIES))
        raise EquiportError(f"no family {chosen!r}", field="--family", remedy=f"Give one of {known}.")
    return found


def folder_of(name: str, work: Path) -> Path:
    """The folder of a configuration below `work`."""
    return work / name.replace(",", "").replace(" ", "_")


def write_model(name: str, folder: Path, seed: int = 7) -> Path:
    """The HF folder of a family's tiny model, with perturbed weights."""
    source = folder.parent / f"{folder.name}-config"
    source.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in FAMILIES[name].items() if key != "num_key_value_heads" or name[:4] != "gpt_"}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return materialize(source, folder, WeightKind.PERTURBED, seed, tiny=False).folder
