"""Llama for NxD Inference.

Serves HuggingFace checkpoints of model type `llama`: tied or separate output head, grouped-query attention, an explicit
head_dim, attention and MLP biases, and RoPE without scaling or with `linear` or `llama3` scaling.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.utils.distributed import get_tp_group
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class LlamaNeuronConfig(NeuronConfig):
    """NeuronConfig of this port; attention is this file's class, whatever the base class defaults to."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attn_cls = NeuronLlamaAttention


class LlamaInferenceConfig(InferenceConfig):
    """Model settings: the HuggingFace config's fields, and what follows from them."""

    def add_derived_config(self) -> None:
        """Fill in what checkpoints may leave out or what newer config files keep elsewhere."""
        self.num_cores_per_group = 1
        rope = getattr(self, "rope_parameters", None) or {}
        if getattr(self, "rope_theta", None) is None and "rope_theta" in rope:
            self.rope_theta = rope["rope_theta"]
        if getattr(self, "rope_scaling", None) is None:
            scaled = rope.get("rope_type", "default") != "default"
            self.rope_scaling = dict(rope) if scaled else None
        if getattr(self, "head_dim", None) is None and hasattr(self, "hidden_size"):
            self.head_dim = self.hidden_size // self.num_attention_heads
        for name, value in (("pad_token_id", None), ("attention_bias", False), ("mlp_bias", False)):
            if not hasattr(self, name):
                setattr(self, name, value)
        for name in ("output_attentions", "output_hidden_states"):
            if not hasattr(self, name):
                setattr(self, name, False)

    def get_required_attributes(self) -> list[str]:
        """Fields without which the model cannot be built."""
        return [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_theta",
            "hidden_act",
        ]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The NeuronConfig class that goes with this config."""
        return LlamaNeuronConfig

    @classmethod
    def from_pretrained(
        cls, model_path: str | os.PathLike[str], neuron_config: NeuronConfig | None = None, **kwargs: Any
    ) -> LlamaInferenceConfig:
        """The config of a HuggingFace folder; `kwargs` override its fields."""
        settings = neuron_config if neuron_config is not None else cls.get_neuron_config_cls()()
        return cls(settings, load_config=load_pretrained_config(model_path), **kwargs)


class Llama3RotaryEmbedding(nn.Module):
    """RoPE whose low frequencies are stretched (`rope_type` llama3).

    A frequency is kept when its wavelength is below `original_max_position_embeddings / high_freq_factor`, divided by
    `factor` when it is above `original_max_position_embeddings / low_freq_factor`, and a blend of the two in between.
    """

    def __init__(self, dim: int, base: float, scaling: dict[str, Any]) -> None:
        super().__init__()
        self.dim = dim
        self.base = base
        self.factor = float(scaling["factor"])
        self.low = float(scaling["low_freq_factor"])
        self.high = float(scaling["high_freq_factor"])
        self.context = float(scaling["original_max_position_embeddings"])
        # Not a buffer: casting the model to bfloat16 must leave the frequencies in float32.
        self.frequencies: Tensor | None = None

    def _scaled_frequencies(self, device: torch.device) -> Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        plain = 1.0 / (self.base ** (steps / self.dim))
        wavelength = 2 * math.pi / plain
        blend = ((self.context / wavelength - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return blend * plain + (1.0 - blend) * plain / self.factor

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch, sequence, dim] each, in the dtype of `x`."""
        if self.frequencies is None:
            self.frequencies = self._scaled_frequencies(x.device)
        angles = position_ids[:, :, None].float() * self.frequencies[None, None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def make_rotary_embedding(config: LlamaInferenceConfig) -> nn.Module:
    """The rotary embedding that the config's `rope_scaling` asks for."""
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "llama3":
        return Llama3RotaryEmbedding(config.head_dim, config.rope_theta, scaling)
    if kind in ("default", "linear"):
        factor = float(scaling["factor"]) if kind == "linear" else None
        return RotaryEmbedding(
            config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            base=config.rope_theta,
            factor=factor,
        )
    raise NotImplementedError(f"rope_scaling of type {kind!r} is not served by this port")


def make_rmsnorm(config: LlamaInferenceConfig) -> nn.Module:
    """The device's fused norm, or HuggingFace's on a CPU, where the fused one does not exist."""
    norm = LlamaRMSNorm if cpu_mode() else CustomRMSNorm
    return norm(config.hidden_size, eps=config.rms_norm_eps)


class NeuronLlamaAttention(NeuronAttentionBase):
    """Grouped-query attention with RoPE; sharding, cache and masks are the base class's."""

    def __init__(self, config: LlamaInferenceConfig) -> None:
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=make_rotary_embedding(config),
            num_cores_per_group=config.num_cores_per_group,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            rms_norm_eps=config.rms_norm_eps,
        )


class NeuronLlamaMLP(nn.Module):
    """SwiGLU: down(act(gate(x)) * up(x)), the intermediate dimension split over the ranks."""

    def __init__(self, config: LlamaInferenceConfig) -> None:
        super().__init__()
        neuron_config = config.neuron_config
        shared = {
            "bias": config.mlp_bias,
            "dtype": neuron_config.torch_dtype,
            "sequence_parallel_enabled": neuron_config.sequence_parallel_enabled,
            "sequence_dimension": 1 if neuron_config.sequence_parallel_enabled else None,
            "tensor_model_parallel_group": get_tp_group(config),
        }
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = ColumnParallelLinear(hidden, intermediate, gather_output=False, **shared)
        self.up_proj = ColumnParallelLinear(hidden, intermediate, gather_output=False, **shared)
        self.down_proj = RowParallelLinear(intermediate, hidden, input_is_parallel=True, **shared)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        gated = self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)
        return self.down_proj(gated)


class NeuronLlamaDecoderLayer(nn.Module):
    """Pre-norm block: attention and MLP, each around a residual."""

    def __init__(self, config: LlamaInferenceConfig) -> None:
        super().__init__()
        self.self_attn = config.neuron_config.attn_cls(config)
        self.mlp = NeuronLlamaMLP(config)
        self.input_layernorm = make_rmsnorm(config)
        self.post_attention_layernorm = make_rmsnorm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Hidden states, new keys and values, the RoPE tables for the next layer, and no pending residual."""
        attention = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = hidden_states + attention.hidden_states
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, attention.present_key_value, attention.cos_cache, attention.sin_cache, None


class NeuronLlamaModel(NeuronBaseModel):
    """Embedding, decoder layers, final norm and output head."""

    def setup_attr_for_model(self, config: LlamaInferenceConfig) -> None:
        """Attributes that the base class sizes the cache and the sampler by."""
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets

    def init_model(self, config: LlamaInferenceConfig) -> None:
        """Build the modules."""
        if not parallel_state.model_parallel_is_initialized():
            raise RuntimeError("initialise the parallel state before building the model (to_cpu and compile do)")
        neuron_config = config.neuron_config
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.pad_token_id,
            dtype=neuron_config.torch_dtype,
            shard_across_embedding=True,
            sequence_parallel_enabled=neuron_config.sequence_parallel_enabled,
            sequence_dimension=self.sequence_dimension,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )
        self.layers = nn.ModuleList([NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = make_rmsnorm(config)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=neuron_config.torch_dtype,
            gather_output=not self.on_device_sampling,
            pad=True,
            tensor_model_parallel_group=get_tp_group(config),
        )


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """The application: compiles, loads and runs `NeuronLlamaModel`."""

    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> LlamaForCausalLM:
        """The HuggingFace model that this one is a port of."""
        return LlamaForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Tensor], config: InferenceConfig) -> dict[str, Tensor]:
        """HuggingFace names (without `model.`) are this port's names; only the ranks are added.

        Attention's projections are renamed and sharded by the base class's own hook.
        """
        converted = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
        ranks = torch.arange(config.neuron_config.tp_degree, dtype=torch.int32)
        converted["rank_util.rank"] = ranks.clone()
        for layer in range(config.num_hidden_layers):
            converted[f"layers.{layer}.self_attn.rank_util.rank"] = ranks.clone()
        return converted

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, Tensor]) -> None:
        """A tied checkpoint does not hold the head."""
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> type[LlamaInferenceConfig]:
        """The config class of this model."""
        return LlamaInferenceConfig

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The NeuronConfig class of this model."""
        return LlamaNeuronConfig

    def get_compiler_args(self) -> str:
        """Flags for neuronx-cc: no automatic cast below the dtype that NeuronConfig asks for."""
        return "--model-type=transformer --auto-cast=none --enable-saturate-infinity -O1"
