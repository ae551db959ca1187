"""Mixtral."""

from __future__ import annotations

from typing import Any

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.utils import cpu_mode
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

from neuronx_distributed_inference.models._hub_model import HubDecoderLayer, HubModel, ranks, stack_experts
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.moe import initialize_moe_module

__getattr__ = attribute_hook(__name__)


def get_rmsnorm_cls() -> Any:
    """Hugging Face's norm in CPU mode, the device's otherwise."""
    return MixtralRMSNorm if cpu_mode() else CustomRMSNorm


def convert_mixtral_to_neuron_state_dict(neuron_state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
    """Rename the router and join the experts of every layer, in place. Raises AssertionError without a gated MLP."""
    assert config.neuron_config.glu_mlp is True, "Only GLU MLP is supported for Mixtral Top-K model"
    neuron_state_dict["rank_util.rank"] = ranks(config.neuron_config)
    for layer in range(config.num_hidden_layers):
        old, new = f"layers.{layer}.block_sparse_moe", f"layers.{layer}.mlp"
        router = neuron_state_dict.pop(f"{old}.gate.weight")
        neuron_state_dict[f"{new}.router.linear_router.weight"] = router.detach().clone()
        stack_experts(neuron_state_dict, old, new, config.num_local_experts, ("w1", "w3", "w2"))
    return neuron_state_dict


class MixtralInferenceConfig(InferenceConfig):
    """What a Mixtral is."""

    def get_required_attributes(self) -> list[str]:
        """Sizes, rotation, experts and norm."""
        sizes = ["hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id"]
        sizes += ["vocab_size", "max_position_embeddings", "rope_theta", "num_local_experts", "num_experts_per_tok"]
        return [*sizes, "rms_norm_eps"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The class with experts."""
        return MoENeuronConfig


class NeuronMixtralAttention(NeuronAttentionBase):
    """Attention without biases; the window is not read."""

    def __init__(self, config: Any) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rotary_emb=RotaryEmbedding(head_dim, config.max_position_embeddings, config.rope_theta),
        )


class NeuronMixtralDecoderLayer(HubDecoderLayer):
    """One layer."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, get_rmsnorm_cls())
        self.self_attn = NeuronMixtralAttention(config=config)
        self.mlp = initialize_moe_module(
            config=config,
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
        )


class NeuronMixtralModel(HubModel):
    """Mixtral's embedding, layers, norm and head."""

    _layer_cls = NeuronMixtralDecoderLayer
    _norm = staticmethod(get_rmsnorm_cls)


class NeuronMixtralForCausalLM(NeuronBaseForCausalLM):
    """Mixtral as it is served."""

    _model_cls = NeuronMixtralModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> Any:
        """Hugging Face's Mixtral."""
        return MixtralForCausalLM.from_pretrained(model_path, **kwargs)

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        """Mixtral's configuration."""
        return MixtralInferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
        """See `convert_mixtral_to_neuron_state_dict`."""
        return convert_mixtral_to_neuron_state_dict(state_dict, config)
