"""Tiny configs of the corpus: the families that recipes serve, and more; every constant binds."""

from __future__ import annotations

from typing import Any

from equiport.bench.family_models import FAMILIES, LLAMA3, YARN

_SHARED: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **_SHARED, **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    **{
        # a field that this family's config class does not have
        name: {key: value for key, value in config.items() if key != "num_key_value_heads" or name[:4] != "gpt_"}
        for name, config in FAMILIES.items()
    },
    "cohere2": _config(
        "cohere2", "Cohere2ForCausalLM", layer_norm_eps=1e-5, logit_scale=0.25, sliding_window=8, head_dim=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=True,
    ),
    "phi": _config(
        "phi", "PhiForCausalLM", layer_norm_eps=1e-5, partial_rotary_factor=0.5, hidden_act="gelu_new",
        num_key_value_heads=6,
    ),
    "hunyuan": _config("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", head_dim=12),
    "starcoder2": _config(
        "starcoder2", "Starcoder2ForCausalLM", norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", use_bias=True,
        sliding_window=8,
    ),
    "gemma": _config(
        "gemma", "GemmaForCausalLM", head_dim=12, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True,
    ),
    "mixtral": _config(
        "mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None,
    ),
    "qwen2_moe": _config(
        "qwen2_moe", "Qwen2MoeForCausalLM", **_EXPERTS, num_experts=6, shared_expert_intermediate_size=56,
        norm_topk_prob=False, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "qwen3_moe": _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", **_EXPERTS, num_experts=6, norm_topk_prob=True, head_dim=12,
        decoder_sparse_step=1, mlp_only_layers=[0],
    ),
    "deepseek_v3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", **_EXPERTS, n_routed_experts=8, n_shared_experts=1, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, q_lora_rank=24,
        kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=6,
        rope_interleave=True, rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "gpt_oss": _config(
        "gpt_oss", "GptOssForCausalLM", head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], swiglu_limit=0.5,
        attention_bias=True, rope_scaling={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "qwen3 llama3": {**FAMILIES["qwen3"], "rope_scaling": LLAMA3},
}  # fmt: skip
