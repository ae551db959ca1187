"""One rank, its groups, and seeded tensors: what most cases start from."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn


def one_rank() -> None:
    """Start one gloo rank and its groups, once."""
    from neuronx_distributed.parallel_layers import parallel_state

    if not torch.distributed.is_initialized():
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.distributed.init_process_group("gloo", world_size=1, rank=0)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1, skip_collective_init=True)


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fill(module: nn.Module, seed: int = 5) -> nn.Module:
    """Floating weights of unit scale (1 / sqrt(fan-in) for matrices), the same for the same parameter names."""
    generator = torch.Generator().manual_seed(seed)
    for _, param in sorted(module.named_parameters(remove_duplicate=False), key=lambda item: item[0]):
        if param.is_floating_point() and param.requires_grad:
            scale = param.shape[-1] ** -0.5 if param.dim() > 1 else 1.0
            param.data = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)
    return module


def served(**flags: Any) -> Any:
    """A NeuronConfig for the CPU: batch 2, sequence 16, float32, unless told otherwise."""
    from neuronx_distributed_inference.models.config import NeuronConfig

    sizes = {"batch_size": 2, "seq_len": 16, "torch_dtype": torch.float32, "on_cpu": True, "padding_side": "right"}
    return NeuronConfig(**{**sizes, "tp_degree": 1, **flags})


def described(neuron_config: Any = None, **attributes: Any) -> Any:
    """An InferenceConfig of a tiny decoder."""
    from neuronx_distributed_inference.models.config import InferenceConfig

    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "output_attentions": False,
        "output_hidden_states": False,
    }
    return InferenceConfig(neuron_config=neuron_config or served(), **{**sizes, **attributes})
