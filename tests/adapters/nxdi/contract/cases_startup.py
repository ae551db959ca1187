"""What starts the process group, each in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import torch
from registry import case, outcome
from world import described


@case(fresh=True)
def a_layer_starts_one_rank_by_itself() -> dict[str, Any]:
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

    before = parallel_state.model_parallel_is_initialized()
    ColumnParallelLinear(4, 6)
    return {
        "before": before,
        "after": parallel_state.model_parallel_is_initialized(),
        "sizes": [parallel_state.get_tensor_model_parallel_size(), parallel_state.get_data_parallel_size()],
        "ranks": [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()],
        "groups": parallel_state.get_tensor_model_parallel_group(as_list=True),
        "a second process group": outcome(lambda: torch.distributed.init_process_group("gloo", world_size=1, rank=0)),
    }


@case(fresh=True)
def a_layer_after_the_process_group_alone() -> dict[str, Any]:
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.distributed.init_process_group("gloo", world_size=1, rank=0)
    return {"error": outcome(lambda: ColumnParallelLinear(4, 6))}


@case(fresh=True)
def a_model_before_anything() -> dict[str, Any]:
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.parallel_layers.layers import SPMDRank
    from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaMLP, NeuronLlamaModel
    from neuronx_distributed_inference.modules.attention.gqa import GroupQueryAttention_QKV

    mlp = NeuronLlamaMLP(described())
    qkv = GroupQueryAttention_QKV(8, 4, 2, 2)
    return {
        "rank": outcome(lambda: SPMDRank(1)),
        "model": outcome(lambda: NeuronLlamaModel(described())),
        "group": outcome(parallel_state.get_tensor_model_parallel_group),
        "mlp": type(mlp.gate_proj).__name__,
        "projection": type(qkv.q_proj).__name__,
        "destroyed": parallel_state.destroy_model_parallel(),
    }


@case(fresh=True)
def groups_are_destroyed_and_made_again() -> dict[str, Any]:
    from world import one_rank

    one_rank()
    from neuronx_distributed.parallel_layers import parallel_state

    parallel_state.destroy_model_parallel()
    gone = parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=8, skip_collective_init=True)
    return {"gone": gone, "cut to the world": parallel_state.get_tensor_model_parallel_size()}
