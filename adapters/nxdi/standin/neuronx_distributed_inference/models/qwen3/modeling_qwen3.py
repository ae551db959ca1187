"""Qwen3."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.utils import cpu_mode
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from neuronx_distributed_inference.models._hub_model import HubDecoderLayer, HubModel, ranks
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaMLP, convert_state_dict_to_fused_qkv
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase, QKNormPlacement
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

__getattr__ = attribute_hook(__name__)


def get_rmsnorm_cls() -> Any:
    """Hugging Face's norm in CPU mode, the device's otherwise."""
    return Qwen3RMSNorm if cpu_mode() else CustomRMSNorm


class NeuronQwen3Attention(NeuronAttentionBase):
    """Attention with a norm of each query and key head before the rotation."""

    def __init__(self, config: Any) -> None:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        norm = get_rmsnorm_cls()
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rotary_emb=RotaryEmbedding(head_dim, config.max_position_embeddings, config.rope_theta),
            num_cores_per_group=config.num_cores_per_group,
            rms_norm_eps=config.rms_norm_eps,
            qk_norm_placement=QKNormPlacement.PRE_ROPE,
            q_layernorm=norm(head_dim, eps=config.rms_norm_eps),
            k_layernorm=norm(head_dim, eps=config.rms_norm_eps),
        )


class Qwen3NeuronConfig(NeuronConfig):
    """How a Qwen3 is served."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attn_cls = NeuronQwen3Attention


class Qwen3InferenceConfig(InferenceConfig):
    """What a Qwen3 is."""

    def get_required_attributes(self) -> list[str]:
        """Sizes, norm, activation and rotation."""
        sizes = ["hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim"]
        sizes += ["pad_token_id", "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "hidden_act"]
        return sizes

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The class that names the attention."""
        return Qwen3NeuronConfig


class NeuronQwen3DecoderLayer(HubDecoderLayer):
    """One layer."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, get_rmsnorm_cls())
        self.self_attn = NeuronQwen3Attention(config)
        self.mlp = NeuronLlamaMLP(config)


class NeuronQwen3Model(HubModel):
    """Qwen3's embedding, layers, norm and head."""

    _layer_cls, _padded = NeuronQwen3DecoderLayer, True
    _norm = staticmethod(get_rmsnorm_cls)


class NeuronQwen3ForCausalLM(NeuronBaseForCausalLM):
    """Qwen3 as it is served."""

    _model_cls = NeuronQwen3Model

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> Any:
        """Hugging Face's Qwen3."""
        return Qwen3ForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
        """Add the ranks, and copies of the head norms under the stack's names; fuse q, k and v if asked."""
        served = config.neuron_config
        if served.vocab_parallel:
            state_dict["embed_tokens.rank_util.rank"] = torch.arange(served.local_ranks_size)
        if served.fused_qkv:
            state_dict = convert_state_dict_to_fused_qkv(state_dict, config)
        for layer in range(config.num_hidden_layers):
            own = f"layers.{layer}.self_attn"
            state_dict[f"{own}.rank_util.rank"] = ranks(served)
            for name in "qk":
                state_dict[f"{own}.{name}_layernorm.weight"] = state_dict[f"{own}.{name}_norm.weight"].detach().clone()
        state_dict["rank_util.rank"] = ranks(served)
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, Any]) -> None:
        """The head is a copy of the embedding."""
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        """Qwen3's configuration."""
        return Qwen3InferenceConfig
