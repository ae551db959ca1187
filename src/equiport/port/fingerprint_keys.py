"""Which facet accounts for which config key, and what a key's value claims about the architecture.

By the key's name alone: a key that no rule knows is never taken for harmless, it becomes an open question.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from equiport.port.fingerprint import ConfigKey, Fingerprint
from equiport.port.fingerprint_mlp import same_activation
from equiport.port.source_reading_keys import KeyRead
from equiport.port.source_reading_model import SourceModel

NO_EFFECT = "none: no effect on inference"
# pattern of the whole key -> facet
_FACETS: tuple[tuple[str, str], ...] = (
    (r"vocab_size|max_position_embeddings|n_positions|n_ctx|max_seq_len", "vocab_size, max_positions"),
    (r"hidden_size|intermediate_size_mlp|n_embd|d_model|word_embed_proj_dim|num_hidden_layers|n_layers?"
     r"|num_layers", "hidden_size, num_layers"),
    (r"num_attention_heads|num_heads|attention_heads|n_heads?|num_key_value_heads|num_kv_heads|multi_query|head_dim|attn_config"
     r"|num_key_value_groups|new_decoder_architecture|n_head_kv", "attention heads and qkv layout"),
    (r"intermediate_size|ffn_dim|n_inner|ffn_hidden_size|expansion_ratio|ffn_config", "mlp.intermediate_size"),
    (r"hidden_act|hidden_activation|activation_function|mlp_hidden_act|activation", "mlp.activation"),
    (r"rms_norm_eps|layer_norm_eps(ilon)?|norm_eps(ilon)?|layernorm_epsilon|norm_epsilon"
     r"|layer_norm_elementwise_affine", "norms.eps"),
    (r"attention_bias|attention_out_bias|qkv_bias|use_qkv_bias|use_bias|bias|enable_bias|mlp_bias|use_mlp_bias"
     r"|no_bias|add_qkv_bias|attention_o_bias", "biases"),
    (r"lm_head_bias|tie_word_embeddings|tie_lm_head_bias", "lm_head_bias, tied_embeddings"),
    (r"rope_theta|rope_scaling|rope_parameters|rotary_pct|rotary_dim|rotary_emb_base|partial_rotary_factor"
     r"|rope_local_base_freq|rotary|original_max_position_embeddings|rope_type|use_rope|alibi|position_embedding_type"
     r"|no_rope_layers|no_rope_layer_interval", "ropes, layers.rope"),
    (r"sliding_window|use_sliding_window|max_window_layers|layer_types|sliding_window_pattern|_sliding_window_pattern"
     r"|attention_types|attention_layers|window_size", "layers.window"),
    (r"attn_logit_softcapping|query_pre_attn_scalar|attention_multiplier|scale_attn_weights|scale_attention"
     r"|clip_qkv|scale_attn_by_inverse_layer_idx|reorder_and_upcast_attn"
     r"|.*softmax_in_fp32", "attention.scale, softcap, clip"),
    (r"final_logit_softcapping|logit_scale|logits_scaling|dim_model_base", "multipliers.logits, logits_softcap"),
    (r"embedding_multiplier|scale_emb|scale_embedding|residual_multiplier|scale_depth|mup_enabled", "multipliers"),
    (r"use_qk_norm|qk_norm|qk_layernorm|use_qk_layernorm", "attention.qk_norm"),
    (r"parallel_attn|use_parallel_residual|num_ln_in_parallel_attn|apply_residual_connection_post_layernorm"
     r"|do_layer_norm_before|_remove_final_layer_norm", "residual"),
    (r"num_(local_|routed_)?experts|n_routed_experts|num_experts_per_tok(en)?|n_shared_experts|norm_topk_prob|n_group"
     r"|topk_group|routed_scaling_factor|scoring_func|topk_method|first_k_dense_replace|decoder_sparse_step"
     r"|mlp_only_layers|moe_.*|shared_expert_intermediate_size|mlp_layer_types|num_shared_experts|router_jitter_noise"
     r"|input_jitter_noise|router_bias|swiglu_(limit|alpha)|route_scale|num_dense_layers|moe", "moe"),
    (r"[qkv]+_lora_rank|qk_(rope|nope)_head_dim|qk_head_dim|v_head_dim|rope_interleave", "attention.latent"),
    (r".*dropout(_prob)?|slow_but_exact|.*_pdrop|use_cache|output_.*|return_dict|use_return_dict|gradient_checkpointing|initializer_range"
     r"|pad_token_id|bos_token_id|eos_token_id|_attn_implementation|attn_implementation|pretraining_tp|aux_loss.*"
     r"|router_aux_loss_coef|router_z_loss.*|chunk_size_feed_forward|layer_?drop|is_decoder|add_cross_attention"
     r"|dtype|torch_dtype|num_labels|problem_type|architectures|base_model_tp_plan|rescale_every"
     r"|moe_load_balance|init_.*|.*_init_.*|per_layer_config|max_length|use_bidirectional_attention"
     r"|output_router_logits|_experts_implementation|default_theta|name_or_path|quantization_config|is_encoder_decoder",
     NO_EFFECT),
)  # fmt: skip
_PATTERNS = tuple((re.compile(pattern), facet) for pattern, facet in _FACETS)


def facet_of(key: str) -> str:
    """The facet that accounts for a key; "" when no rule knows it."""
    return next((facet for pattern, facet in _PATTERNS if pattern.fullmatch(key)), "")


def describe_keys(source: SourceModel, read: list[KeyRead]) -> tuple[ConfigKey, ...]:
    """Every config attribute that the source reads: value, where it comes from, the facet that accounts for it."""
    keys = []
    defaults = source.config.to_dict()
    for key in read:
        stored = source.renamed.get(key.name, key.name)
        value = plain(_value(source, key.name))
        stands_for = stored if stored != key.name else ""
        if key.name in source.raw and plain(source.raw[key.name]) == value:
            origin = "verbatim"
        elif stands_for and stands_for in source.raw:
            origin = "renamed"
        elif key.name in source.raw or key.name not in defaults or _derived(source, key.name):
            origin = "computed"
        else:
            origin = "default"
        keys.append(ConfigKey(key.name, value, origin, facet_of(key.name), stands_for))  # type: ignore[arg-type]
    return tuple(keys)


def _value(source: SourceModel, name: str) -> Any:
    try:
        return getattr(source.config, name, source.raw.get(name))
    except Exception:
        return source.config.to_dict().get(name)


def _derived(source: SourceModel, name: str) -> bool:
    """Whether the config class makes the value from other keys: it differs from an empty config's."""
    try:
        empty = type(source.config)()
    except Exception:
        return False
    return plain(empty.to_dict().get(name)) != plain(source.config.to_dict().get(name))


def plain(value: Any) -> Any:
    """A config value as JSON types; text for what has none."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    return str(value)


def contradictions(fingerprint: Fingerprint, raw: dict[str, Any], unsettled: set[str]) -> list[tuple[str, str, str]]:
    """Keys of config.json whose value says something else than what was measured: (key, it says, measured).

    Keys of a facet that is `unsettled` anyway are left out.
    """
    found = []
    for key, claim in _CLAIMS.items():
        if any(word in facet_of(key) for word in unsettled):
            continue
        if key in raw and raw[key] is not None:
            said = claim(fingerprint, raw[key], raw)
            if said is not None and said[0] != said[1]:
                found.append((key, said[0], said[1]))
    return found


_Claim = Callable[[Fingerprint, Any, dict[str, Any]], "tuple[str, str] | None"]


def _window(f: Fingerprint, value: Any, raw: dict[str, Any]) -> tuple[str, str] | None:
    if raw.get("use_sliding_window") is False or not isinstance(value, int) or not f.attention or not f.attention.scale:
        return None
    if (f.max_positions or 0) <= value or (raw.get("layer_types") and "sliding_attention" not in raw["layer_types"]):
        return None
    if isinstance(raw.get("max_window_layers"), int) and raw["max_window_layers"] >= f.num_layers:
        return None
    windows = sorted({layer.window for layer in f.layers if layer.window})
    return f"window {value}", f"window {windows[0]}" if windows else "no window"


def _qk_norm(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    if not isinstance(value, bool) or not f.attention or not f.attention.scale:
        return None
    return f"qk-norm {value}", f"qk-norm {f.attention.qk_norm is not None}"


def _attention_bias(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    if not isinstance(value, bool) or not f.attention:
        return None
    return f"bias on q, k, v {value}", f"bias on q, k, v {f.attention.q_bias}"


def _mlp_bias(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    return (f"bias {value}", f"bias {f.mlp.up_bias}") if isinstance(value, bool) and f.mlp else None


def _activation(f: Fingerprint, value: Any, raw: dict[str, Any]) -> tuple[str, str] | None:
    if not f.mlp or not isinstance(value, str):
        return None
    agrees = same_activation(value, f.mlp.activation) or value == f.mlp.activation
    return f"activation {value}", f"activation {value if agrees else f.mlp.activation}"


def _head_dim(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    return (f"{value}", f"{f.attention.head_dim}") if f.attention and f.attention.scale else None


def _kv_heads(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    return (f"{value}", f"{f.attention.num_kv_heads}") if f.attention and f.attention.scale else None


def _number(read: Callable[[Fingerprint], float | None]) -> _Claim:
    def claim(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
        measured = read(f)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        if measured is None:
            return f"{value:g}", "no such thing"
        return f"{value:g}", f"{value:g}" if abs(measured - value) <= 1e-6 * abs(value) else f"{measured:g}"

    return claim


def _theta(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    if not f.ropes or not isinstance(value, (int, float)):
        return None
    bases = [rope.theta for rope in f.ropes]
    return f"base {value:g}", f"base {value if value in bases else bases[0]:g}"


def _scaling(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    if not isinstance(value, dict) or not f.ropes:
        return None
    kind = value.get("rope_type", value.get("type"))
    if not isinstance(kind, str):
        return None
    kinds = {rope.kind for rope in f.ropes}
    known = {"su": "longrope", "default": "default"}.get(kind, kind)
    return f"rope {known}", f"rope {known}" if known in kinds else f"rope {', '.join(sorted(kinds))}"


def _tied(f: Fingerprint, value: Any, _: dict[str, Any]) -> tuple[str, str] | None:
    return f"tied {value}", f"tied {f.tied_embeddings}"


_CLAIMS: dict[str, _Claim] = {
    "sliding_window": _window,
    "qk_norm": _qk_norm, "use_qk_norm": _qk_norm, "qk_layernorm": _qk_norm,
    "attention_bias": _attention_bias, "qkv_bias": _attention_bias, "use_qkv_bias": _attention_bias,
    "mlp_bias": _mlp_bias,
    "hidden_act": _activation, "hidden_activation": _activation, "activation_function": _activation,
    "head_dim": _head_dim, "num_key_value_heads": _kv_heads,
    "rope_theta": _theta, "rope_scaling": _scaling,
    "tie_word_embeddings": _tied,
    "attn_logit_softcapping": _number(lambda f: f.attention.softcap if f.attention else None),
    "final_logit_softcapping": _number(lambda f: f.logits_softcap),
    "clip_qkv": _number(lambda f: f.attention.clip_qkv if f.attention else None),
    "embedding_multiplier": _number(lambda f: f.multipliers.embedding),
    "residual_multiplier": _number(lambda f: f.multipliers.residual),
    "logit_scale": _number(lambda f: f.multipliers.logits),
}  # fmt: skip
