"""Qwen3's mixture of experts."""

from __future__ import annotations

import math
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.utils import cpu_mode
from torch import Tensor
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from neuronx_distributed_inference.models._hub_model import HubDecoderLayer, HubModel, ranks, stack_experts
from neuronx_distributed_inference.models.config import (
    SHARD_ON_INTERMEDIATE_DIMENSION_PER_TP,
    InferenceConfig,
    MoENeuronConfig,
    NeuronConfig,
)
from neuronx_distributed_inference.models.llama.modeling_llama import convert_state_dict_to_fused_qkv
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module

__getattr__ = attribute_hook(__name__)


def get_rmsnorm_cls() -> Any:
    """Hugging Face's norm in CPU mode, the device's otherwise."""
    return Qwen3MoeRMSNorm if cpu_mode() else CustomRMSNorm


def convert_qwen3_moe_hf_to_neuron_state_dict(neuron_state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Rename norms and router and join the experts of every layer, in place. Every layer must have experts.

    Raises:
        AssertionError: without a gated MLP.
        KeyError: a layer without experts.
        StandInRefused: a checkpoint in fp8.
    """
    assert config.neuron_config.glu_mlp is True, "Only GLU MLP is supported"
    if any(key.endswith("_scale_inv") for key in neuron_state_dict):
        refuse("a checkpoint with scales", "quantization")
    served, pad = config.neuron_config, getattr(config, "moe_intermediate_pad_size", 0)
    neuron_state_dict["rank_util.rank"] = ranks(served)
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        neuron_state_dict[f"{attention}.rank_util.rank"] = ranks(served)
        renamed = {f"{attention}.{name}_norm.weight": f"{attention}.{name}_layernorm.weight" for name in "qk"}
        renamed[f"{mlp}.gate.weight"] = f"{mlp}.router.linear_router.weight"
        for old, new in renamed.items():
            neuron_state_dict[new] = neuron_state_dict.pop(old).detach().clone()
        stack_experts(neuron_state_dict, mlp, mlp, config.num_experts, ("gate_proj", "up_proj", "down_proj"), pad)
    return convert_state_dict_to_fused_qkv(neuron_state_dict, config) if served.fused_qkv else neuron_state_dict


class Qwen3MoeInferenceConfig(InferenceConfig):
    """What it is; sets the serving configuration's router (softmax, float32) and normalisation too.

    The width of an expert becomes `intermediate_size`, widened by zeros where a sharding of it asks for that.
    """

    num_experts: int
    moe_intermediate_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served: Any = self.neuron_config
        self.num_local_experts, self.n_shared_experts = self.num_experts, 0
        if served.blockwise_matmul_config.use_shard_on_intermediate_dynamic_while:
            unit = SHARD_ON_INTERMEDIATE_DIMENSION_PER_TP * served.moe_tp_degree
            if (self.moe_intermediate_size // served.moe_tp_degree) % SHARD_ON_INTERMEDIATE_DIMENSION_PER_TP:
                width = math.ceil(self.moe_intermediate_size / unit) * unit
                self.moe_intermediate_pad_size = width - self.moe_intermediate_size
                self.moe_intermediate_size = width
        self.intermediate_size = self.moe_intermediate_size
        served.router_config.dtype, served.router_config.act_fn = torch.float32, "softmax"
        served.disable_numeric_cc_token = True
        served.normalize_top_k_affinities = True

    def get_required_attributes(self) -> list[str]:
        """Sizes, norm, activation, rotation and experts."""
        sizes = ["head_dim", "hidden_act", "hidden_size", "max_position_embeddings", "moe_intermediate_size"]
        sizes += ["norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers"]
        sizes += ["num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "tie_word_embeddings"]
        return [*sizes, "vocab_size"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The class with experts."""
        return MoENeuronConfig


class NeuronQwen3MoEAttention(NeuronAttentionBase):
    """Attention with a norm of each query and key head before the rotation."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=RotaryEmbedding(config.head_dim, config.max_position_embeddings, config.rope_theta),
            rms_norm_eps=config.rms_norm_eps,
        )
        norm = get_rmsnorm_cls()
        self.q_layernorm = norm(self.head_dim, self.rms_norm_eps)
        self.k_layernorm = norm(self.head_dim, self.rms_norm_eps)


class NeuronQwen3MoeDecoderLayer(HubDecoderLayer):
    """One layer; all of them have experts."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, get_rmsnorm_cls())
        self.self_attn = NeuronQwen3MoEAttention(config=config)
        self.moe_fused_nki_kernel_enabled = False
        self.mlp = initialize_moe_module(config=config)
        self.moe_mask_padded_tokens = config.neuron_config.moe_mask_padded_tokens

    def _run_mlp(self, hidden_states: Tensor, padding_mask: Any) -> Tensor:
        return self.mlp(hidden_states, padding_mask)[0]


class NeuronQwen3MoeModel(HubModel):
    """Embedding, layers, norm and head."""

    _layer_cls = NeuronQwen3MoeDecoderLayer
    _norm = staticmethod(get_rmsnorm_cls)


class NeuronQwen3MoeForCausalLM(NeuronBaseForCausalLM):
    """The model as it is served."""

    _model_cls = NeuronQwen3MoeModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> Any:
        """Hugging Face's model."""
        return Qwen3MoeForCausalLM.from_pretrained(model_path, **kwargs)

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        """Its configuration."""
        return Qwen3MoeInferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
        """See `convert_qwen3_moe_hf_to_neuron_state_dict`."""
        return convert_qwen3_moe_hf_to_neuron_state_dict(state_dict, config)
