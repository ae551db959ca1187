"""Process-group and launcher look-ups."""

from __future__ import annotations

import os
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refused_call
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import indices_split_along_dim
from torch import Tensor

__getattr__ = attribute_hook(__name__)

get_dp_rank = refused_call(f"{__name__}.get_dp_rank", "attention data parallelism")
get_cp_rank = refused_call(f"{__name__}.get_cp_rank", "context parallelism")


def _launcher_number(*names: str) -> int:
    given = [os.environ[name] for name in names if os.environ.get(name)]
    return int(given[0]) if given else -1


def get_init_world_size() -> int:
    """World size that the launcher (torchrun, mpirun) set, or -1."""
    return _launcher_number("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def get_init_rank() -> int:
    """Rank that the launcher (torchrun, mpirun) set, or -1."""
    return _launcher_number("RANK", "OMPI_COMM_WORLD_RANK")


def get_tp_group(config: Any) -> Any:
    """None (each layer takes the default tensor group), unless the configuration names a draft model's group."""
    if not hasattr(config.neuron_config, "use_draft_group"):
        return None
    if config.neuron_config.use_draft_group:
        return refused_call("use_draft_group", "speculation")()
    return parallel_state.get_tensor_model_parallel_group()


def split_along_dim(tensor: Tensor | None, dim: int, rank: Any, num_partitions: int) -> Tensor | None:
    """`rank`'s piece of `tensor` along `dim`; None for None."""
    if tensor is None:
        return None
    indices = indices_split_along_dim(tensor, dim, rank, num_partitions)
    assert indices is not None
    return torch.index_select(tensor, dim, indices)
