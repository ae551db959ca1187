"""Grouped-query projections: head counts, renaming, replication and padding of a checkpoint; the MLP."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from world import described, draw, fill, one_rank, served

DEGREES = (1, 2, 3, 4, 8, 16)
HEADS = ((4, 4), (8, 2), (6, 3), (6, 1), (12, 4), (5, 5))


def _projection(kind: str, degree: int, heads: tuple[int, int], **options: Any) -> Any:
    one_rank()
    from neuronx_distributed_inference.modules.attention import gqa

    if kind == "QKV":
        options.setdefault("gather_output", False)
    cls = getattr(gqa, f"GroupQueryAttention_{kind}")
    return cls(
        hidden_size=8,
        head_dim=2,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tp_degree=degree,
        **options,
    )


@case
def head_counts() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention import gqa

    out: dict[str, Any] = {}
    for degree in DEGREES:
        for heads in HEADS:
            for wish in (None, *gqa.GQA):
                strategy = gqa.determine_sharding_strategy(degree, heads[1], wish)
                counts = list(gqa.get_shardable_head_counts(degree, *heads, strategy))
                out[f"{degree} {heads} {wish and wish.name}"] = [strategy.name, *counts]
    out["impossible"] = outcome(lambda: gqa.get_shardable_head_counts(4, 6, 3, gqa.GQA.REPLICATE_TO_TP_DEGREE))
    return out


@case
def hooks_of_queries_keys_and_values() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for degree in DEGREES:
        for heads in HEADS:
            rows = (heads[0] * 2, heads[1] * 2, heads[1] * 2)
            state = {}
            for seed, (name, n) in enumerate(zip("qkv", rows, strict=True)):
                state[f"layers.1.self_attn.{name}_proj.weight"] = draw(n, 8, seed=seed)
                state[f"layers.1.self_attn.{name}_proj.bias"] = draw(n, seed=seed + 5)
            layer = _projection("QKV", degree, heads, bias=True)
            out[f"{degree} {heads} result"] = layer.preshard_hook(state, "layers.1.self_attn.qkv_proj.weight")
            out.update({f"{degree} {heads} {key}": value for key, value in state.items()})
    return out


@case
def hooks_of_a_fused_projection() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for degree in DEGREES:
        for heads in HEADS:
            rows = (heads[0] + 2 * heads[1]) * 2
            state = {"self_attn.Wqkv.weight": draw(rows, 8), "self_attn.Wqkv.bias": draw(rows, seed=2)}
            layer = _projection("QKV", degree, heads, bias=True, fused_qkv=True)
            layer.preshard_hook(state, "self_attn.qkv_proj.weight")
            out.update({f"{degree} {heads} {key}": value for key, value in state.items()})
            marks = ("fused_qkv", "num_attention_heads", "num_key_value_heads", "head_dim")
            out[f"{degree} {heads} marks"] = [getattr(layer.Wqkv.weight, mark, None) for mark in marks]
    return out


@case
def hooks_of_the_output() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for degree in DEGREES:
        for heads in HEADS:
            state = {"a.attn.out_proj.weight": draw(8, heads[0] * 2), "a.attn.out_proj.bias": draw(8)}
            layer = _projection("O", degree, heads, bias=True, layer_name="out_proj")
            layer.preshard_hook(state, "a.attn.o_proj.weight")
            out.update({f"{degree} {heads} {key}": value for key, value in state.items()})
    return out


@case
def hooks_of_a_bad_checkpoint() -> dict[str, Any]:
    def state(*names: str) -> dict[str, Any]:
        return {f"x.{name}": draw(8, 8) for name in names}

    whole = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    plain, biased = _projection("QKV", 1, (4, 4)), _projection("QKV", 1, (4, 4), bias=True)
    output, biased_output = _projection("O", 1, (4, 4)), _projection("O", 1, (4, 4), bias=True)
    extra = {**state(*whole), "x.q_proj.bias": draw(8)}
    plain.preshard_hook(extra, "x.qkv_proj.weight")
    top = {"q_proj.weight": draw(8, 8), "k_proj.weight": draw(8, 8), "v_proj.weight": draw(8, 8)}
    return {
        "a weight absent": outcome(lambda: plain.preshard_hook(state(*whole[:2]), "x.qkv_proj.weight")),
        "a bias absent": outcome(lambda: biased.preshard_hook(state(*whole), "x.qkv_proj.weight")),
        "output absent": outcome(lambda: output.preshard_hook({}, "x.o_proj.weight")),
        "output bias absent": outcome(lambda: biased_output.preshard_hook(state("o_proj.weight"), "x.o_proj.weight")),
        "a bias too many": sorted(extra),
        "no enclosing module": outcome(lambda: plain.preshard_hook(top, "qkv_proj.weight")),
        "no enclosing module keys": sorted(top),
        "fused and gathered": outcome(lambda: _projection("QKV", 1, (4, 4), fused_qkv=True, gather_output=True)),
    }


@case
def forward() -> dict[str, Any]:
    x = draw(2, 3, 8)
    q, k, v, residual = fill(_projection("QKV", 1, (4, 2)))(x, residual=draw(1))
    fused = fill(_projection("QKV", 1, (4, 2), fused_qkv=True, clip_qkv=0.4, bias=True))(x)
    y = fill(_projection("O", 1, (4, 2), bias=True, input_is_parallel=True))(x)
    names = dict(zip(("fused q", "fused k", "fused v"), fused[:3], strict=True))
    return {"q": q, "k": k, "v": v, "residual": residual, **names, "fused residual": fused[3], "output": y}


@case
def mlp() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaMLP

    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"mlp_bias": True}, {"hidden_act": "gelu_pytorch_tanh"}):
            block = fill(NeuronLlamaMLP(described(served(torch_dtype=dtype), **options))).eval()
            result = block(draw(2, 5, 32, dtype=dtype))
            out[f"{dtype} {options}"], out[f"{dtype} {options} second"] = result
    out["in training"] = outcome(lambda: block.train()(draw(2, 5, 32)))
    out["with a norm"] = outcome(lambda: block.eval()(draw(2, 5, 32), rmsnorm=torch.nn.LayerNorm(32)))
    state = {f"layers.0.mlp.{name}_proj.weight": draw(4, 4, seed=n) for n, name in enumerate(("gate", "up", "down"))}
    renamed = dict(state)
    block.preshard_hook(renamed, "layers.0.feed_forward.weight")
    block.preshard_hook(state, "layers.0.mlp.weight")
    return {**out, "keys": sorted(state), "renamed": sorted(renamed), **renamed}


@case
def checkpoint_of_a_rank() -> dict[str, Any]:
    """The whole way from a converted checkpoint to one rank's weights, for ranks of larger worlds."""
    one_rank()
    from neuronx_distributed.trace import trace
    from torch import nn

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = _projection("QKV", 1, (4, 2), bias=True)
            self.o_proj = _projection("O", 1, (4, 2))
            self.norm = nn.LayerNorm(8)

    model = Whole()
    state: dict[str, Any] = {f"x.{name}_proj.weight": draw(n, 8) for name, n in (("q", 8), ("k", 4), ("v", 4))}
    state |= {f"x.{name}_proj.bias": draw(n) for name, n in (("q", 8), ("k", 4), ("v", 4))}
    state |= {"x.o_proj.weight": draw(8, 8), "x.norm.weight": draw(8), "stray": draw(2)}
    holder = nn.ModuleDict({"x": model})
    trace.get_sharded_checkpoint(state, holder, 0, 1)
    wrong = {"x.qkv_proj.q_proj.weight": draw(9, 8)}
    return {
        "keys": sorted(state),
        **state,
        "piece": trace.create_local_weight(1, 4, draw(8, 4), 0, 2, 1),
        "strided piece": trace.create_local_weight(1, 2, draw(8, 4), 0, 4, 2),
        "fused piece": trace.create_local_weight_qkv(1, 2, draw(16, 4), 0, 8, 4),
        "wrong shape": outcome(lambda: trace.shard_children(holder, wrong, "", None, 0, 1)),
    }
