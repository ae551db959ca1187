"""Mixtures of experts: routing, experts and their combination, shared experts, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from world import described, draw, fill, one_rank

DTYPES = (torch.float32, torch.bfloat16)
EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 32, 24


def moe_served(**flags: Any) -> Any:
    """A MoENeuronConfig for the CPU."""
    from neuronx_distributed_inference.models.config import MoENeuronConfig

    sizes = {"batch_size": 2, "seq_len": 16, "torch_dtype": torch.float32, "on_cpu": True, "padding_side": "right"}
    return MoENeuronConfig(**{**sizes, "tp_degree": 1, **flags})


def moe_described(served: Any, **attributes: Any) -> Any:
    """What `initialize_moe_module` reads."""
    sizes = {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "intermediate_size": INNER,
        "n_shared_experts": 0,
    }
    return described(served, **{**sizes, **attributes})


def moe(flags: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **attributes: Any) -> Any:
    """A filled mixture of experts."""
    one_rank()
    from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module

    return fill(initialize_moe_module(moe_described(moe_served(**(flags or {})), **attributes), **(options or {})))


def calls(module: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A prompt, a decode step, and a decode step of one row (which loads its own experts alone)."""
    return {
        "prefill": module(draw(2, 9, HIDDEN, dtype=dtype))[0],
        "decode": module(draw(5, 1, HIDDEN, seed=3, dtype=dtype))[0],
        "one row": module(draw(1, 1, HIDDEN, seed=4, dtype=dtype))[0],
        "two tokens": module(draw(1, 2, HIDDEN, seed=5, dtype=dtype))[0],
    }


def _router(kind: str = "RouterTopK", **options: Any) -> Any:
    one_rank()
    from neuronx_distributed.modules.moe import routing

    return fill(getattr(routing, kind)(EXPERTS, CHOSEN, HIDDEN, **options))


@case
def routers() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for act in ("softmax", "sigmoid"):
        for over in (False, True):
            for dtype in DTYPES:
                router = _router(act_fn=act, apply_act_fn_over_topk=over, dtype=dtype, bias=over)
                for inputs in DTYPES:
                    out[f"{act} {over} {dtype} {inputs}"] = router(draw(2, 5, HIDDEN, dtype=inputs))
    router = _router(store_transposed_weights=True)
    checkpoint = {"mlp.router.linear_router.weight": draw(EXPERTS, HIDDEN, seed=9)}
    router.preshard_hook(checkpoint, "mlp.router.weight")
    out["checkpoint"] = checkpoint
    out["names"] = sorted(router.state_dict())
    return out


@case
def routers_refuse() -> dict[str, Any]:
    late = _router()
    late.act_fn = "tanh"
    return {
        "top_k": outcome(lambda: type(late)(4, 5, HIDDEN)),
        "no top_k": outcome(lambda: type(late)(4, 0, HIDDEN)),
        "activation": outcome(lambda: _router(act_fn="relu")),
        "later": outcome(lambda: late(draw(1, 2, HIDDEN))),
        "default": late.dtype,
    }


@case
def group_limited_router() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in DTYPES:
        router = _router("GroupLimitedRouter", n_group=4, topk_group=2, dtype=dtype)
        out[f"{dtype} without a bias"] = outcome(lambda router=router: router(draw(1, 2, HIDDEN)))
        for scale in (0.0, 0.3, -3.0):
            router.e_score_correction_bias = torch.nn.Parameter(draw(EXPERTS, seed=7, dtype=dtype) * 0.2 + scale)
            out[f"{dtype} {scale}"] = router(draw(2, 20, HIDDEN, dtype=dtype))
    return out


@case
def mixtures() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, flags in {
            "default": {},
            "not normalized": {"disable_normalize_top_k_affinities": True},
            "sigmoid": {"router_config": {"act_fn": "sigmoid", "dtype": "float32"}},
            "loose keywords": {"router_act_fn": "sigmoid", "router_dtype": torch.bfloat16},
            "no glu": {"glu_mlp": False},
            "swiglu": {"glu_type": "swiglu"},
            "blocks": {"blockwise_matmul_config": {"block_size": 4}},
            "blocks, tokens skipped": {"blockwise_matmul_config": {"block_size": 4, "skip_dma_token": True}},
        }.items():
            module = moe({"torch_dtype": dtype, **flags})
            out.update({f"{dtype} {name} {call}": value for call, value in calls(module, dtype).items()})
    return out


@case
def mixtures_with_biases_and_clamps() -> dict[str, Any]:
    out: dict[str, Any] = {}
    flags = {
        "glu_type": "swiglu",
        "hidden_act_scaling_factor": 1.702,
        "hidden_act_bias": 1.0,
        "gate_clamp_upper_limit": 0.7,
        "up_clamp_upper_limit": 0.6,
        "up_clamp_lower_limit": -0.6,
    }
    options = {"router_bias": True, "experts_bias": True, "apply_act_fn_over_topk": True}
    for dtype in DTYPES:
        served = {"torch_dtype": dtype, "disable_normalize_top_k_affinities": True, **flags}
        module = moe(served, options, hidden_act="sigmoid")
        out.update({f"{dtype} {call}": value for call, value in calls(module, dtype).items()})
        blocks = moe({**served, "blockwise_matmul_config": {"block_size": 4}}, options, hidden_act="sigmoid")
        out.update({f"{dtype} blocks {call}": value for call, value in calls(blocks, dtype).items()})
        checkpoint = {f"mlp.{key}": value for key, value in module.state_dict().items()}
        module.expert_mlps.preshard_hook(checkpoint, "mlp.expert_mlps.weight")
        out[f"{dtype} checkpoint"] = {key: value for key, value in checkpoint.items() if "router" not in key}
    return out


@case
def one_expert_a_token() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for early in (False, True):
        flags = {"disable_normalize_top_k_affinities": True, "early_expert_affinity_modulation": early}
        for dtype in DTYPES:
            for block in (512, 4):
                served = {"torch_dtype": dtype, "blockwise_matmul_config": {"block_size": block}, **flags}
                module = moe(served, num_experts_per_tok=1)
                found = calls(module, dtype)
                out.update({f"{early} {dtype} {block} {call}": value for call, value in found.items()})
    out["normalized"] = outcome(lambda: moe(num_experts_per_tok=1))
    return out


@case
def early_modulation_of_two_experts() -> dict[str, Any]:
    module = moe({"early_expert_affinity_modulation": True, "blockwise_matmul_config": {"block_size": 4}})
    whole = moe({"early_expert_affinity_modulation": True})
    return {
        "blocks": module(draw(2, 9, HIDDEN))[0],
        "one row": module(draw(1, 1, HIDDEN))[0],
        "all experts": outcome(lambda: whole(draw(2, 9, HIDDEN))),
    }


@case
def padded_tokens() -> dict[str, Any]:
    mask = torch.ones(2, 9, dtype=torch.int32)
    mask[1, 5:] = 0
    blocks = {"blockwise_matmul_config": {"block_size": 4}}
    return {
        "blocks": moe(blocks)(draw(2, 9, HIDDEN), mask)[0],
        "all experts": moe()(draw(2, 9, HIDDEN), mask)[0],
        "decode": moe(blocks)(draw(2, 1, HIDDEN), mask[:, :1] * 0)[0],
    }


@case
def shared_experts() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in DTYPES:
        for name, flags in {
            "apart": {},
            "fused": {"fused_shared_experts": True},
            "transposed": {"transpose_shared_experts_weights": True},
        }.items():
            module = moe({"torch_dtype": dtype, **flags}, n_shared_experts=2)
            out.update({f"{dtype} {name} {call}": value for call, value in calls(module, dtype).items()})
            out[f"{name} shapes"] = {key: list(value.shape) for key, value in module.state_dict().items()}
    module = moe({"transpose_shared_experts_weights": True}, n_shared_experts=1)
    names = ("gate_proj", "up_proj", "down_proj")
    checkpoint = {f"m.{name}.weight": draw(3, 5, seed=place) for place, name in enumerate(names)}
    module.shared_experts.preshard_hook(checkpoint, "m.weight")
    out["checkpoint"] = checkpoint
    return out


@case
def what_a_mixture_returns() -> dict[str, Any]:
    asked = moe({"return_expert_index": True, "return_router_logits": True})
    out: dict[str, Any] = {
        "plain": moe()(draw(1, 3, HIDDEN)),
        "asked": asked(draw(1, 3, HIDDEN)),
        "residual": asked(draw(1, 3, HIDDEN), residual=draw(1, 3, HIDDEN, seed=6)),
        "training": moe().training,
    }
    from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

    norm = CustomRMSNorm(HIDDEN)
    one = moe({"return_router_logits": True}, {"rmsnorm": norm, "init_tkg_module": True}, n_shared_experts=1)
    out.update({f"own block {call}": value for call, value in calls(one).items()})
    out["own block residual"] = one(draw(3, 1, HIDDEN), residual=draw(3, 1, HIDDEN, seed=6))
    out["names"] = sorted(one.state_dict())
    return out


@case
def mixtures_from_loose_arguments() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed_inference.modules.moe import initialize_moe_module

    out: dict[str, Any] = {}
    for capacity in (None, 1.0, 0.5, 9.0):
        for normalize in (True, False):
            module = initialize_moe_module(
                described(moe_served(capacity_factor=capacity)),
                EXPERTS,
                CHOSEN,
                HIDDEN,
                INNER,
                "gelu",
                normalize_top_k_affinities=normalize,
            )
            out.update({f"{capacity} {normalize} {call}": value for call, value in calls(fill(module)).items()})
    out["dtypes"] = {key: str(value.dtype) for key, value in module.state_dict().items()}
    return out


@case
def expert_helpers() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
    from neuronx_distributed.modules.moe.model_utils import ACT2FN, ACTFunc, GLUType, get_platform_lnc

    index = torch.tensor([[0, 3], [2, 1], [3, 0]])
    mask = ExpertMLPsV2.get_expert_mask(index, 5)
    affinities = draw(3, 5).softmax(1)
    return {
        "mask": mask,
        "masked": ExpertMLPsV2.get_expert_affinities_masked(affinities, mask, False),
        "normalized": ExpertMLPsV2.get_expert_affinities_masked(affinities, mask, True),
        "activations": {name: act(draw(7)) for name, act in ACT2FN.items()},
        "kinds": [GLUType.validate(None).value, GLUType.validate("swiglu").name, GLUType.validate(GLUType.GLU).value],
        "unknown kind": outcome(lambda: GLUType.validate("geglu")),
        "numbers": {kind.name_str: [kind.value, kind.id] for kind in ACTFunc},
        "by name": [ACTFunc.validate(None).name, ACTFunc.validate("gelu_tanh_approx").name],
        "unknown number": [outcome(lambda: ACTFunc.validate("mish")), outcome(lambda: ACTFunc.validate(3))],
        "platform": int(get_platform_lnc()),
        "unknown activation": outcome(lambda: moe(hidden_act="gelu_new")),
    }


@case
def expert_layers() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed.modules.moe import moe_parallel_layers as layers

    out: dict[str, Any] = {}
    for name in ("ExpertFusedColumnParallelLinear", "ExpertFusedRowParallelLinear"):
        for bias in (False, True):
            for dtype in DTYPES:
                layer = fill(getattr(layers, name)(4, 6, 10, bias=bias, dtype=dtype))
                x = draw(1, 2, 3, 6, dtype=dtype)
                out[f"{name} {bias} {dtype}"] = layer(x)
                out[f"{name} {bias} {dtype} own"] = layer(x.expand(4, -1, -1, -1))
                out[f"{name} {bias} {dtype} chosen"] = layer(x, torch.tensor([2, 0]))
        out[f"{name} shapes"] = {key: list(value.shape) for key, value in layer.state_dict().items()}
        out[f"{name} marks"] = [
            getattr(layer.weight, mark) for mark in ("partition_dim", "partition_stride", "num_partitions")
        ]
        out[f"{name} mixed up"] = outcome(lambda layer=layer: layer(draw(3, 2, 3, 6)))
    return out


@case
def moe_flags() -> dict[str, Any]:
    names = ("capacity_factor", "glu_mlp", "glu_type", "hidden_act_scaling_factor", "hidden_act_bias")
    names += ("normalize_top_k_affinities", "early_expert_affinity_modulation", "fused_shared_experts")
    names += ("moe_tp_degree", "moe_ep_degree", "return_router_logits", "moe_mask_padded_tokens", "seq_len")
    blocks = ("block_size", "skip_dma_token", "use_torch_block_wise", "parallelize_token_to_block_mapping")

    def read(served: Any) -> dict[str, Any]:
        router = {"act_fn": served.router_config.act_fn, "dtype": served.router_config.dtype}
        mine = {name: getattr(served.blockwise_matmul_config, name) for name in blocks}
        return {**{name: getattr(served, name) for name in names}, "router": router, "blocks": mine}

    from neuronx_distributed_inference.models.config import RouterConfig

    return {
        "default": read(moe_served()),
        "set": read(
            moe_served(
                capacity_factor=2,
                disable_normalize_top_k_affinities=True,
                blockwise_matmul_config={"block_size": 8, "nonsense": 1},
                router_config={"dtype": "bfloat16"},
                seq_len=32,
            )
        ),
        "an object is passed over": read(moe_served(router_config=RouterConfig("sigmoid"))),
        "router dtype": outcome(lambda: moe_served(router_config={"dtype": "int8"})),
        "strategy": outcome(lambda: moe_served(blockwise_matmul_config={"block_sharding_strategy": "ALL"})),
    }


@case
def sizes_that_disagree() -> dict[str, Any]:
    from neuronx_distributed.modules.moe.model import MoE

    module = moe()
    return {"router": outcome(lambda: MoE(_router("RouterTopK", bias=True), _other(module)))}


def _other(module: Any) -> Any:
    module.expert_mlps.routed_experts_mlp_config.top_k = 3
    return module.expert_mlps
