"""Parallel layers on one rank."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from world import draw, fill, one_rank


def _linear(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    one_rank()
    from neuronx_distributed.parallel_layers import layers

    layer = getattr(layers, kind)(12, 20, dtype=dtype, **options)
    return fill(layer).eval()


@case
def column() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(2, 5, 12, dtype=dtype)
        for options in ({}, {"bias": False}, {"gather_output": False}, {"pad": True}):
            out[f"{dtype} {options}"] = _linear("ColumnParallelLinear", dtype, **options)(x)
        y, bias = _linear("ColumnParallelLinear", dtype, skip_bias_add=True)(x)
        out[f"{dtype} skipped"], out[f"{dtype} bias"] = y, bias
        out[f"{dtype} sliced"] = _linear("ColumnParallelLinear", dtype, bias=False)(x, torch.tensor([3, 1]))
    return out


@case
def row() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = draw(2, 5, 12, dtype=dtype)
        for options in ({}, {"bias": False}, {"input_is_parallel": True}, {"pad": True}, {"reduce_dtype": dtype}):
            y = _linear("RowParallelLinear", dtype, **options)(x)
            out[f"{dtype} {options}"] = y
        out[f"{dtype} index 0 is batch row 0"] = y[0]
    return out


@case
def padded_vocabulary() -> dict[str, Any]:
    layer = _linear("ColumnParallelLinear", torch.float32, pad=True, pad_alignment_size_per_rank=16, bias=False)
    biased = _linear("ColumnParallelLinear", torch.float32, pad=True, pad_alignment_size_per_rank=16)
    kept = _linear(
        "ColumnParallelLinear", torch.float32, pad=True, pad_alignment_size_per_rank=16, keep_padded_output=True
    )
    state = {"head.weight": draw(20, 12), "head.bias": draw(20)}
    layer.preshard_hook(state, "head.weight")
    layer.preshard_hook(state, "head.bias")
    again = {"head.weight": draw(19, 12)}
    return {
        **state,
        "pad": layer.pad_size,
        "narrowed": layer(draw(1, 3, 12)),
        "kept": kept(draw(1, 3, 12)),
        "a padded bias does not fit": outcome(lambda: biased(draw(1, 3, 12))),
        "wrong size": outcome(lambda: layer.preshard_hook(again, "head.weight")),
        "neither": outcome(lambda: layer.preshard_hook({"head.scale": draw(20, 12)}, "head.scale")),
    }


@case
def pad_needs_eval() -> dict[str, Any]:
    out: dict[str, Any] = {}
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    for kind in ("ColumnParallelLinear", "RowParallelLinear"):
        layer = _linear(kind, torch.float32, pad=True).train()
        out[kind] = outcome(lambda layer=layer: layer(draw(1, 2, 12)))
    embedding = ParallelEmbedding(10, 4, pad=True)
    out["embedding"] = outcome(lambda: embedding(torch.tensor([[1]])))
    return out


@case
def embedding() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    out: dict[str, Any] = {}
    ids = torch.tensor([[0, 3, 7], [7, 7, 1]])
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"shard_across_embedding": True}, {"pad": True}, {"use_spmd_rank": True}):
            layer = fill(ParallelEmbedding(11, 6, 7, dtype=dtype, **options)).eval()
            out[f"{dtype} {options}"] = layer(ids)
            out[f"{dtype} {options} padding row"] = layer.weight[7]
            out[f"{dtype} {options} padding_idx"] = layer.padding_idx
    out["int32 ids"] = layer(ids.int())
    return out


@case
def fresh_weights() -> dict[str, Any]:
    """A seed gives the same weights, and biases are not zero: what a missing checkpoint key leaves behind."""
    one_rank()
    from neuronx_distributed.parallel_layers import layers

    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        for kind in ("ColumnParallelLinear", "RowParallelLinear"):
            layer = getattr(layers, kind)(12, 20, dtype=dtype)
            out[f"{dtype} {kind} weight"], out[f"{dtype} {kind} bias"] = layer.weight, layer.bias
        out[f"{dtype} embedding"] = layers.ParallelEmbedding(11, 6, 7, dtype=dtype).weight
    return out


@case
def marks() -> dict[str, Any]:
    """The attributes by which a checkpoint is cut."""
    one_rank()
    from neuronx_distributed.parallel_layers import layers, utils

    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions", "rank_ordering")
    tensors = {
        "column": layers.ColumnParallelLinear(4, 6).weight,
        "column bias": layers.ColumnParallelLinear(4, 6, gather_output=False).bias,
        "gathered bias": layers.ColumnParallelLinear(4, 6).bias,
        "row": layers.RowParallelLinear(4, 6).weight,
        "embedding": layers.ParallelEmbedding(4, 6).weight,
        "embedding by feature": layers.ParallelEmbedding(4, 6, shard_across_embedding=True).weight,
        "rank": layers.SPMDRank(4).rank,
    }
    out: dict[str, Any] = {
        key: {name: getattr(tensor, name, "unset") for name in names} for key, tensor in tensors.items()
    }
    out["marked twice"] = outcome(lambda: utils.set_tensor_model_parallel_attributes(tensors["row"], True, 0, 1, 1))
    out["rank value"] = layers.SPMDRank(4).get_rank()
    return out


@case
def sizes() -> dict[str, Any]:
    from neuronx_distributed.parallel_layers import pad, utils
    from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group

    return {
        "divide": [utils.divide(12, 4), outcome(lambda: utils.divide(12, 5))],
        "padding": [utils.get_padding_length(n, 8) for n in range(1, 20)],
        "heads": [pad.get_number_of_extra_heads(n, 8) for n in range(1, 20)],
        "cores": calculate_num_cores_per_group(32, 8, 32),
        "split": list(utils.split_tensor_along_last_dim(draw(2, 6), 3)),
        "range": list(utils.EmbeddingUtility.range_from_global_vocab_size(24, 2, 4)),
    }


@case
def collectives_of_one_rank() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed.parallel_layers import mappings

    x = draw(2, 4, 6)
    return {
        "reduce": mappings.reduce_from_tensor_model_parallel_region(x),
        "gather": mappings.gather_from_tensor_model_parallel_region(x),
        "scatter": mappings.scatter_to_tensor_model_parallel_region(x),
        "copy": mappings.copy_to_tensor_model_parallel_region(x),
        "sequence": mappings.gather_from_sequence_parallel_region(x, 1),
        "reduce scatter": mappings.reduce_scatter_to_sequence_parallel_region(x, 1),
        "with dim": mappings.gather_from_tensor_model_parallel_region_with_dim(x, 1),
    }
