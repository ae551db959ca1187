"""The flags of `NeuronConfig`: defaults, which ones the stand-in serves, and what follows from them."""

from __future__ import annotations

import os
from typing import Any

import torch
from neuronx_distributed._standin.missing import refuse

_UNSET: Any = object()

# Served: what the CPU path of the stack reads.
_SERVED: dict[str, Any] = {
    "batch_size": 1,
    "padding_side": "right",
    "allow_input_truncation": False,
    "seq_len": 128,
    "n_active_tokens": _UNSET,
    "n_positions": _UNSET,
    "on_cpu": False,
    "output_logits": False,
    "torch_dtype": torch.bfloat16,
    "cast_type": "config",
    "rpl_reduce_dtype": None,
    "attention_dtype": None,
    "max_context_length": _UNSET,
    "max_new_tokens": _UNSET,
    "max_length": _UNSET,
    "vocab_parallel": False,
    "fused_qkv": False,
    "attn_cls": "NeuronLlamaAttention",
    "ctx_batch_size": _UNSET,
    "tkg_batch_size": _UNSET,
    "max_batch_size": _UNSET,
    "is_continuous_batching": False,
    "kv_cache_batch_size": _UNSET,
    "on_device_sampling_config": None,
    "enable_bucketing": False,
    "buckets": _UNSET,
    "bucket_n_active_tokens": False,
    "context_encoding_buckets": None,
    "token_generation_buckets": None,
    "tp_degree": 1,
    "world_size": None,
    "start_rank_id": 0,
    "local_ranks_size": None,
    "qk_layernorm": False,
    "attn_kernel_enabled": None,
    "logical_nc_config": _UNSET,
    "lm_head_pad": _UNSET,
    "lm_head_pad_alignment_size": 1,
}

# Without effect on a CPU: kept as data.
_DATA: dict[str, Any] = {
    "enable_cte_modular_flow": False,
    "weight_gather_seq_len_threshold": 32768,
    "disable_argmax_kernel": False,
    "prefix_buckets": None,
    "quantized_checkpoints_path": None,
    "quantization_type": "per_tensor_symmetric",
    "quantization_dtype": "int8",
    "quantization_block_size": None,
    "quantization_block_axis": None,
    "quantization_scale_dtype": "f32",
    "modules_to_not_convert": None,
    "draft_model_modules_to_not_convert": None,
    "spec_batch_size": _UNSET,
    "pa_num_blocks": _UNSET,
    "pa_block_size": _UNSET,
    "save_sharded_checkpoint": False,
    "skip_sharding": False,
    "enable_ve_data_parallel": False,
    "disable_kv_cache_tiling": False,
    "attn_block_tkg_nki_kernel_use_online_softmax": True,
    "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb": False,
    "quantize_clamp_bound": float("inf"),
    "cc_pipeline_tiling_factor": 2,
    "seq_len_threshold_for_cc_tiling": 16384,
    "target": None,
    "enable_spill_reload_dge": False,
    "weights_to_skip_layout_optimization": _UNSET,
    "dma_order_config": None,
    "skip_warmup": False,
    "scratchpad_page_size": _UNSET,
    "enable_output_completion_notifications": False,
    "disable_numeric_cc_token": False,
    "switch_cc": False,
    "ep_dispatch_cc_option": "AR_AG",
    "medusa_speculation_length": 0,
    "num_medusa_heads": 0,
    "medusa_tree": None,
}

# Refused unless they keep their default: kernels, quantization, speculation, other cache layouts, other parallelisms.
_REFUSED: dict[str, Any] = {
    "layer_boundary_markers": False,
    "sequence_parallel_enabled": False,
    "kv_cache_padding_size": 0,
    "async_mode": False,
    "token_generation_batches": None,
    "quantized": False,
    "is_mxfp4_compute": False,
    "is_full_model_shuffled": False,
    "kv_cache_quant": False,
    "kv_quant_config": None,
    "speculation_length": 0,
    "enable_fused_speculation": False,
    "enable_eagle_speculation": False,
    "eagle_rolling_buffer_kernel_enabled": False,
    "is_eagle3": False,
    "is_eagle_draft": False,
    "enable_eagle_draft_input_norm": False,
    "token_tree_config": None,
    "is_medusa": False,
    "is_block_kv_layout": False,
    "is_prefix_caching": False,
    "windowed_context_encoding_size": None,
    "chunked_prefill_config": None,
    "tensor_replacement_config": None,
    "tensor_capture_config": None,
    "lora_config": None,
    "cp_degree": 1,
    "mlp_cp_degree": 1,
    "attention_dp_degree": 1,
    "pp_degree": 1,
    "ep_degree": 1,
    "pre_rope_rmsnorm": False,
    "flash_decoding_enabled": False,
    "k_cache_transposed": False,
    "strided_context_parallel_kernel_enabled": False,
    "qkv_kernel_enabled": False,
    "qkv_nki_kernel_enabled": False,
    "qkv_cte_nki_kernel_fuse_rope": False,
    "qkv_kernel_nbsd_layout": False,
    "mlp_kernel_enabled": False,
    "mlp_tkg_nki_kernel_enabled": False,
    "fused_rmsnorm_skip_gamma": False,
    "mlp_kernel_fuse_residual_add": False,
    "qkv_kernel_fuse_residual_add": False,
    "quantized_mlp_kernel_enabled": False,
    "out_proj_kernel_enabled": False,
    "activation_quantization_type": None,
    "attn_tkg_nki_kernel_enabled": False,
    "attn_tkg_builtin_kernel_enabled": False,
    "attn_block_tkg_nki_kernel_enabled": False,
    "attn_block_tkg_nki_kernel_cache_update": False,
    "attn_block_tkg_nki_kernel_cascaded_attention": False,
    "attn_block_cte_nki_kernel_enabled": False,
    "rmsnorm_quantize_kernel_enabled": False,
    "moe_fused_nki_kernel_enabled": None,
    "router_topk_nki_kernel_enabled": None,
    "expert_mlp_nki_kernel_enabled": None,
    "shared_mlp_nki_kernel_enabled": None,
    "apply_seq_ids_mask": False,
    "padded_hidden_size": None,
    "padded_intermediate_size": None,
}

DEFAULTS: dict[str, Any] = {**_SERVED, **_DATA, **_REFUSED}

# Attributes that are no keywords: the same at every setting that is served.
_FIXED: dict[str, Any] = {
    "is_prefill_stage": None,
    "is_hidden_dim_shuffled": False,
    "is_intermediate_dim_shuffled": False,
    "enable_token_tree": False,
    "is_chunked_prefill": False,
    "kv_cache_tiling": False,
    "kv_cache_update_with_kernel": False,
    "tile_cc": False,
}


def refuse_unserved(values: dict[str, Any]) -> None:
    """Refuse every flag that the stand-in does not serve.

    Raises:
        StandInRefused: names the first such flag and its value.
    """
    for name, default in _REFUSED.items():
        value = values[name]
        if value != default and not (not value and not default):  # None, 0 and False all switch a flag off
            refuse(f"NeuronConfig({name}={value!r})")


def derive(values: dict[str, Any]) -> None:
    """Fill in, in place, what follows from other flags.

    Raises:
        AssertionError, ValueError: sizes or dtypes that exclude each other.
    """

    def fall_back(name: str, value: Any) -> None:
        if values[name] is _UNSET:
            values[name] = value

    for name in ("n_active_tokens", "n_positions", "max_context_length", "max_length", "pa_block_size"):
        fall_back(name, values["seq_len"])
    for name in (
        "ctx_batch_size",
        "tkg_batch_size",
        "max_batch_size",
        "kv_cache_batch_size",
        "spec_batch_size",
        "pa_num_blocks",
    ):
        fall_back(name, values["batch_size"])
    fall_back("max_new_tokens", values["seq_len"] - values["max_context_length"])
    values["max_new_tokens"] = values["max_new_tokens"] or None
    fall_back("buckets", [values["seq_len"]])
    fall_back("weights_to_skip_layout_optimization", [])
    if values["cast_type"] not in ("config", "as-declared"):
        raise ValueError("cast_type must be one of config, as-declared")
    if values["attention_dtype"] not in (None, values["torch_dtype"]):
        assert values["cast_type"] == "as-declared", "an attention dtype of its own needs cast_type='as-declared'"
    assert values["max_context_length"] <= values["max_length"], "max_context_length cannot be more than max_length"
    for name, limit in (("context_encoding_buckets", "max_context_length"), ("token_generation_buckets", "max_length")):
        if values[name] is not None:
            values[name].sort()
            assert values[name][-1] <= values[limit], f"{name} must not exceed {limit} ({values[limit]})"
    if values["world_size"] is None:
        values["world_size"] = values["tp_degree"]
    if values["local_ranks_size"] is None:
        values["local_ranks_size"] = values["world_size"]
    forced = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", -1))
    fall_back("logical_nc_config", 1)
    values["logical_nc_config"] = forced if forced != -1 else int(values["logical_nc_config"])
    fall_back("lm_head_pad", values["logical_nc_config"] > 1)
    values["enable_long_context_mode"] = values["max_context_length"] >= 32 * 1024
    fall_back("scratchpad_page_size", 1024 if values["enable_long_context_mode"] else None)
    values.update(_FIXED)
