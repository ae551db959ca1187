"""Norms, rotations, layouts and softmax, as functions."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from world import draw

POSITIONS = torch.tensor([[0, 1, 2, 3, 9], [0, 1, 1, 1, 1]])


@case
def rms_norm() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        norm = CustomRMSNorm(8, eps=1e-5).to(dtype)
        norm.weight.data = draw(8, seed=2, dtype=dtype)
        out[str(dtype)] = norm(draw(2, 3, 8, dtype=dtype) * 7)
    return out


@case
def rms_norm_without_a_width() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

    norm = CustomRMSNorm()
    before = norm.weight
    first = norm(draw(2, 3, 8))
    return {
        "before": before,
        "first": first,
        "weight": norm.weight,
        "eps": norm.variance_epsilon,
        "another width": outcome(lambda: norm(draw(2, 3, 4))),
    }


@case
def rmsnorm_cls() -> dict[str, Any]:
    import os

    from neuronx_distributed.utils import cpu_mode
    from neuronx_distributed_inference.models.llama.modeling_llama import get_rmsnorm_cls

    out: dict[str, Any] = {"no width": outcome(get_rmsnorm_cls)}
    for mode in ("1", "0"):
        os.environ["NXD_CPU_MODE"] = mode
        norm = get_rmsnorm_cls(8)
        norm.weight.data = draw(8, seed=2)
        out[f"cpu_mode {mode}"] = [type(norm).__name__, norm.variance_epsilon, cpu_mode()]
        out[f"value {mode}"] = norm(draw(2, 3, 8))
    return out


@case
def rotary_tables() -> dict[str, Any]:
    from neuronx_distributed_inference.models.llama.modeling_llama import Llama3RotaryEmbedding
    from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding

    out: dict[str, Any] = {}
    tables = {
        "default": RotaryEmbedding(16, base=10000),
        "large base": RotaryEmbedding(16, max_position_embeddings=64, base=5e5),
        "linear": RotaryEmbedding(16, base=10000, factor=4.0),
        "llama3": Llama3RotaryEmbedding(64, base=5e5, original_max_position_embeddings=128),
    }
    for name, table in tables.items():
        for dtype in (torch.float32, torch.bfloat16):
            cos, sin = table.to(dtype)(draw(2, 1, 5, 16, dtype=dtype), POSITIONS)
            out[f"{name} {dtype} cos"], out[f"{name} {dtype} sin"] = cos, sin
        out[f"{name} frequencies"] = table.inv_freq
        out[f"{name} again"] = table.get_inv_freqs()
    return out


@case
def rotation() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding, apply_rotary_pos_emb

    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        q, k = draw(2, 4, 5, 16, dtype=dtype), draw(2, 2, 5, 16, seed=2, dtype=dtype)
        cos, sin = RotaryEmbedding(16)(q, POSITIONS)
        out[f"{dtype} q"], out[f"{dtype} k"] = apply_rotary_pos_emb(q, k, cos, sin)
        sbhd = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
        out[f"{dtype} other layout"] = sbhd[0]
    return out


@case
def polar_rotation() -> dict[str, Any]:
    from neuronx_distributed.modules.attention.utils import (
        apply_rotary_polar_compatible,
        apply_scaling,
        precompute_freqs_cis,
    )

    angles = precompute_freqs_cis(16, 32, 5e5, True, original_max_position_embeddings=16)
    out: dict[str, Any] = {
        "angles": precompute_freqs_cis(16, 32),
        "scaled": angles,
        "scaling": apply_scaling(torch.logspace(-6, 0, 40)),
        "low precision": outcome(lambda: apply_rotary_polar_compatible(draw(1), draw(1), angles.bfloat16())),
    }
    for dtype in (torch.float32, torch.bfloat16):
        q, k = draw(2, 5, 4, 16, dtype=dtype), draw(2, 5, 2, 16, seed=2, dtype=dtype)
        out[f"{dtype} q"], out[f"{dtype} k"] = apply_rotary_polar_compatible(q, k, angles[POSITIONS])
    return out


@case
def deepseek_rotation() -> dict[str, Any]:
    from neuronx_distributed_inference.models.deepseek import rope_util

    stretched = {"scaling_factor": 40.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0}
    tables = {
        "plain": rope_util.DeepseekV3RotaryEmbedding(16, base=5e4),
        "yarn": rope_util.DeepseekV3YarnRotaryEmbedding(16, **stretched),
        "yarn of one place": rope_util.DeepseekV3YarnRotaryEmbedding(16, **stretched, beta_fast=1, beta_slow=1),
        "not stretched": rope_util.DeepseekV3YarnRotaryEmbedding(16),
    }
    out: dict[str, Any] = {
        "mscale": [rope_util.yarn_get_mscale(scale, 0.7) for scale in (0.5, 1, 40)],
        "range": rope_util.yarn_find_correction_range(32, 1, 64, 1e4, 4096),
        "ramp": [rope_util.yarn_linear_ramp_mask(2, 2, 6), rope_util.yarn_linear_ramp_mask(1, 4, 6)],
    }
    for name, table in tables.items():
        for dtype in (torch.float32, torch.bfloat16):
            q = draw(2, 4, 5, 16, dtype=dtype)
            cos, sin = table(q, seq_len=12)
            out[f"{name} {dtype}"] = [cos, sin, rope_util.apply_rotary_pos_emb(q, cos, sin, POSITIONS)]
        out[f"{name} angles"] = table.get_freqs_table(torch.device("cpu"), 7)
        out[f"{name} given"] = table(draw(1), freqs=draw(3, 8))
    return out


@case
def heads() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention.utils import move_heads_front, repeat_kv

    norm = torch.nn.LayerNorm(6)
    x = draw(2, 5, 24)
    return {
        "plain": move_heads_front(x, 2, 5, 4, 6),
        "norm before": move_heads_front(x, 2, 5, 4, 6, norm),
        "norm after": move_heads_front(x, 2, 5, 4, 6, layernorm=norm, post_transpose_layernorm=True),
        "repeated": repeat_kv(draw(2, 3, 5, 4), 2),
        "once": repeat_kv(draw(2, 3, 5, 4), 1),
    }


@case
def split_softmax() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention.utils import manual_softmax

    prior, active = draw(2, 3, 1, 7) * 9, draw(2, 3, 1, 1, seed=2) * 9
    prior[0, :, :, 2:] = torch.finfo(torch.float32).min
    several = draw(2, 3, 4, 4, seed=3)
    one, more = manual_softmax(prior, active, False), manual_softmax(draw(2, 3, 4, 7), several, True)
    return {"prior": one[0], "active": one[1], "several prior": more[0], "several active": more[1]}


@case
def general_attention() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention.utils import neuron_scaled_dot_product_attention as attend

    q, k, v = draw(2, 4, 5, 8), draw(2, 4, 5, 8, seed=2), draw(2, 4, 5, 8, seed=3)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    return {
        "all": attend(q, k, v),
        "causal": attend(q, k, v, is_causal=True),
        "seen": attend(q, k, v, attn_mask=seen, scale=0.3),
        "added": attend(q, k, v, attn_mask=seen.float() * 2),
        "grouped": attend(q, k[:, :2], v[:, :2], enable_gqa=True),
    }


@case
def last_window_and_chunk() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention import utils

    k, v = draw(3, 2, 12, 4), draw(3, 2, 12, 4, seed=2)
    lengths = torch.tensor([12, 3, 7])
    places = torch.arange(12)[None].expand(3, -1)
    positions = places.masked_fill(places >= lengths[:, None], 1)
    out: dict[str, Any] = {}
    for window in (3, 5, 8, 12):
        out[f"window {window} k"], out[f"window {window} v"] = utils.get_last_kv_window(window, positions, k, v)
    for chunk in (4, 5, 12):
        out[f"chunk {chunk} k"], out[f"chunk {chunk} v"] = utils.get_last_kv_chunk(chunk, positions, k, v)
    out["window past the sequence"] = outcome(lambda: utils.get_last_kv_window(20, positions, k, v))
    for stride in (1, 2, 3):
        strided = utils.stride_tensor(k, 2, stride)
        out[f"strided {stride}"], out[f"back {stride}"] = strided, utils.order_strided_tensor(strided, 2, stride)
    return out


@case
def transposed_weight() -> dict[str, Any]:
    from world import one_rank

    one_rank()
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
    from neuronx_distributed_inference.modules.attention.utils import transpose_parallel_linear_layer

    layer = ColumnParallelLinear(4, 6, bias=False)
    turned = transpose_parallel_linear_layer(layer.weight)
    state = {"a.weight": draw(6, 4)}
    read = turned.get_tensor_from_state_dict("a.", state)
    turned.set_tensor_to_state_dict("a.", read, state)
    return {
        "value": turned.detach(),
        "same": torch.equal(turned, layer.weight.t()),
        "dim": turned.partition_dim,
        "read": read,
        "written": state["a.weight"],
        "absent": outcome(lambda: turned.get_tensor_from_state_dict("b.", state)),
        "cached": turned.get_tensor_from_state_dict("a.", {"a.weight": draw(6, 4, seed=9)}),
    }


@case
def sampling() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.modules.generation import sampling

    logits = draw(2, 1, 10)
    params = sampling.prepare_sampling_params(2, top_k=[5, 9], top_p=[0.5, 1.0], temperature=[0.0, 1.0])
    config = OnDeviceSamplingConfig()
    bad = {"k": [[999, 1.0, 1.0]], "half k": [[1.5, 1.0, 1.0]], "p": [[1, 0.0, 1.0]], "t": [[0, 1.0, 0.0]]}
    return {
        "masked": sampling.mask_padded_logits(logits, torch.tensor(0), 1, 3),
        "not the last rank": sampling.mask_padded_logits(logits, torch.tensor(0), 2, 3),
        "no padding": sampling.mask_padded_logits(logits, torch.tensor(0), 1, 0),
        "one for all": sampling.prepare_sampling_params(3, [1], [1.0], [1.0]),
        "params": params.clone(),
        "inferred": sampling.infer_sampling_params(params),
        "changed in place": params,
        **{
            f"bad {key}": outcome(lambda row=row: sampling.validate_sampling_params(torch.tensor(row), config))
            for key, row in bad.items()
        },
    }


@case
def samplers() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.generation.sampling import create_sampler
    from world import served

    logits = draw(3, 40) * 3
    rows = {
        "greedy": [[1, 1.0, 1.0]] * 3,
        "mixed": [[1, 1.0, 1.0], [8, 0.7, 1.3], [20, 0.2, 0.6]],
        "all": [[20, 1.0, 1.0], [20, 0.999, 1.0], [0, 0.5, 1.0]],
    }
    out: dict[str, Any] = {}
    for name, options in {
        "largest": {},
        "sampled": {"do_sample": True},
        "deterministic": {"do_sample": True, "deterministic": True},
        "dynamic": {"dynamic": True, "deterministic": True},
        "whole vocabulary": {"do_sample": True, "deterministic": True, "global_topk": 0},
        "dealt to ranks": {"sampling_dp_degree": 2},
    }.items():
        sampler = create_sampler(served(on_device_sampling_config={"global_topk": 30, **options}), 1)
        for kind, params in rows.items():
            torch.manual_seed(3)
            out[f"{name} {kind}"] = sampler(logits.clone(), torch.tensor(params))
            out[f"{name} {kind} values"] = sampler(logits.clone(), torch.tensor(params), return_values=True)
        if options.get("do_sample"):
            out[f"{name} of several"] = sampler(draw(3, 2, 40) * 3, torch.tensor(rows["mixed"]))
    small = create_sampler(served(on_device_sampling_config={"do_sample": True}))
    out["fewer tokens than global_topk"] = outcome(lambda: small(logits.clone(), torch.tensor(rows["greedy"])))
    out["off"] = outcome(lambda: create_sampler(served()))
    return out


@case
def layer_markers() -> dict[str, Any]:
    from neuronx_distributed_inference.models.layer_boundary_marker import (
        ModuleMarkerEndWrapper,
        ModuleMarkerStartWrapper,
    )
    from neuronx_distributed_inference.utils.distributed import get_tp_group
    from world import described

    return {
        "config without a draft group": get_tp_group(described()),
        "one": ModuleMarkerStartWrapper()(draw(2, 3)),
        "several": ModuleMarkerEndWrapper()(draw(2), draw(3)),
    }
