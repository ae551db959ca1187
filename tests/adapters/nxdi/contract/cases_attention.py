"""The attention block: prefill, then decode steps on a cache, for each of its options."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from torch import Tensor
from world import described, draw, fill, one_rank, served

LENGTHS = torch.tensor([7, 4])
WIDTH = 8


def _block(cls: Any = None, flags: dict[str, Any] | None = None, **options: Any) -> Any:
    one_rank()
    from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
    from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding

    config = described(served(seq_len=WIDTH, **(flags or {})))
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    options.setdefault("rotary_emb", RotaryEmbedding(options.get("head_dim", 8)))
    return fill((cls or NeuronAttentionBase)(config, **{**sizes, **options})).eval()


def _positions() -> Tensor:
    places = torch.arange(WIDTH)[None].expand(2, -1)
    return places.masked_fill(places >= LENGTHS[:, None], 1)


def _causal() -> Tensor:
    return torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)


def _run(block: Any, dtype: torch.dtype = torch.float32, mask: Tensor | None = None, **kw: Any) -> dict[str, Any]:
    """Prefill of two ragged rows, then one decode step on its K and V."""
    x = draw(2, WIDTH, 32, dtype=dtype)
    first = block(x, attention_mask=_causal() if mask is None else mask, position_ids=_positions(), **kw)
    hidden, (k, v), cos, sin = first
    out = {"hidden": hidden, "k": k, "v": v, "cos": cos, "sin": sin}
    window = block.sliding_window or block.attention_chunk_size or WIDTH
    past = [torch.nn.functional.pad(part, (0, 0, 0, window - part.shape[2])) for part in (k, v)]
    slot = torch.arange(window)[None, :]
    if block.attention_chunk_size:
        seen = slot < (LENGTHS % window)[:, None]
    else:
        seen = (slot < LENGTHS[:, None]) & (slot < (window - 1 if block.sliding_window else window))
    step = block(
        draw(2, 1, 32, seed=4, dtype=dtype),
        attention_mask=seen[:, None, None, :],
        position_ids=LENGTHS[:, None],
        past_key_value=past,
        **kw,
    )
    return {**out, "step": step[0], "step k": step.present_key_value[0], "step residual": step[4]}


@case
def plain() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        block = _block(flags={"torch_dtype": dtype}).to(dtype)
        out.update({f"{dtype} {key}": value for key, value in _run(block, dtype).items()})
    return out


def _variants(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, option in options.items():
        out.update({f"{name} {key}": value for key, value in _run(_block(**option)).items()})
    return out


@case
def sizes_and_scales() -> dict[str, Any]:
    return _variants(
        {
            "scale is a divisor": {"softmax_scale": 3.0},
            "one kv head": {"num_key_value_heads": 1},
            "mha": {"num_key_value_heads": 4},
            "wide heads": {"head_dim": 16},
            "biases": {"qkv_bias": True, "o_bias": True},
            "clipped": {"clip_qkv": 0.3},
            "fused": {"flags": {"fused_qkv": True}},
            "fused and clipped": {"flags": {"fused_qkv": True}, "clip_qkv": 0.3, "qkv_bias": True},
            "no rotation": {"rotary_emb": None},
            "sinks": {"learned_sinks_size": 1},
        }
    )


@case
def norms_of_queries_and_keys() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.attention.attention_base import QKNormPlacement
    from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

    def norms() -> dict[str, Any]:
        return {"q_layernorm": CustomRMSNorm(8), "k_layernorm": CustomRMSNorm(8)}

    after = {"use_qk_norm": True, "qk_norm_placement": QKNormPlacement.POST_ROPE}
    out = _variants(
        {
            "before the rotation": norms(),
            "after the transposition": {**norms(), "post_transpose_layernorm": True},
            "by flag": {"flags": {"qk_layernorm": True}},
            "use_qk_norm": {"use_qk_norm": True, "num_key_value_heads": 4},
            "use_qk_norm after": {**after, "num_key_value_heads": 4},
            "use_qk_norm after, grouped": after,
        }
    )
    out["use_qk_norm grouped"] = outcome(lambda: _run(_block(use_qk_norm=True)))
    out["one of the two"] = outcome(lambda: _block(q_layernorm=CustomRMSNorm(8)))
    return out


@case
def windowed() -> dict[str, Any]:
    place = torch.arange(WIDTH)
    out: dict[str, Any] = {}
    for window in (3, 5, 8):
        near = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - window)
        mask = near[None, None].expand(2, 1, -1, -1)
        found = _run(_block(sliding_window=window), mask=mask)
        out.update({f"window {window} {key}": value for key, value in found.items()})
    out["window past seq_len"] = outcome(lambda: _run(_block(sliding_window=20)))
    return out


@case
def chunked() -> dict[str, Any]:
    place = torch.arange(WIDTH)
    same = (place[None, :] <= place[:, None]) & (place[None, :] // 4 == place[:, None] // 4)
    out = _run(_block(attention_chunk_size=4), mask=same[None, None].expand(2, 1, -1, -1))
    whole = _block(attention_chunk_size=WIDTH)
    out["covers seq_len"] = whole.attention_chunk_size
    out["covers seq_len hidden"] = _run(whole)["hidden"]
    out["with sinks"] = outcome(lambda: _run(_block(attention_chunk_size=4, learned_sinks_size=1)))
    return out


@case
def polar_option() -> dict[str, Any]:
    """`use_polar_compatible_rope` rotates in global attention, and has no effect in windowed attention."""
    options = {"rope_theta": 10000.0}
    out = {f"global {key}": value for key, value in _run(_block(**options), use_polar_compatible_rope=True).items()}
    window = _block(sliding_window=5, **options)
    found = _run(window, use_polar_compatible_rope=True)
    out.update({f"windowed {key}": value for key, value in found.items()})
    out["windowed ignores it"] = torch.equal(found["hidden"], _run(window)["hidden"])
    scaled = _run(_block(use_scaled_rope=True, **options), use_polar_compatible_rope=True)
    return {**out, "scaled": scaled["hidden"], "scaled k": scaled["k"]}


@case
def tables_are_handed_on() -> dict[str, Any]:
    """cos and sin that are given are used, whatever the block's own rotation is."""
    from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding

    first, other = _block(), _block(rotary_emb=RotaryEmbedding(8, base=100.0))
    x, mask = draw(2, WIDTH, 32), _causal()
    _, _, cos, sin = first(x, attention_mask=mask, position_ids=_positions())
    given = other(x, attention_mask=mask, position_ids=_positions(), cos_cache=cos, sin_cache=sin)
    own = other(x, attention_mask=mask, position_ids=_positions())
    return {"given": given[0], "own": own[0], "as the first": torch.equal(given[0], first(x, mask, _positions())[0])}


@case
def result_shape() -> dict[str, Any]:
    out = _block()(draw(2, WIDTH, 32), attention_mask=_causal(), position_ids=_positions(), residual=draw(2))
    hidden, kv, cos, sin = out
    return {
        "unpacks to": len(list(out)),
        "index 4 is the residual": out[4],
        "index 5": out[5],
        "past the end": outcome(lambda: out[6]),
        "frozen": outcome(lambda: setattr(out, "residual", None)),
        "names": [out.hidden_states is hidden, out.present_key_value is kv, out.cos_cache is cos, out.sin_cache is sin],
        "rmsnorm is not applied": torch.equal(
            _block()(draw(2, WIDTH, 32), _causal(), _positions(), rmsnorm=torch.nn.LayerNorm(32))[0], hidden
        ),
    }


@case
def other_dtype_of_attention() -> dict[str, Any]:
    flags = {"torch_dtype": torch.bfloat16, "attention_dtype": torch.float32, "cast_type": "as-declared"}
    block = _block(flags=flags)
    out = _run(block, torch.bfloat16)
    windowed = _block(flags=flags, sliding_window=5)
    return {**out, "windowed does not cast": outcome(lambda: _run(windowed, torch.bfloat16))}


@case
def kernels_of_long_prompts() -> dict[str, Any]:
    """Which prompts the stack gives to a kernel: the stand-in then refuses, the real one without its kernel fails."""
    block = _block()
    out: dict[str, Any] = {}
    for lnc, enabled in ((1, None), (1, True), (1, False), (2, None), (2, False)):
        block.logical_nc_config, block.attn_kernel_enabled = lnc, enabled
        for length in (8, 256, 512, 1024, 1100, 4096):
            key = f"lnc {lnc} {enabled} {length}"
            out[key] = [block.get_flash_attention_strategy(length, mask).name for mask in (True, False)]
    return out


@case
def head_counts() -> dict[str, Any]:
    block = _block(num_attention_heads=8, head_dim=4, num_key_value_heads=2)
    names = ("num_heads", "num_key_value_heads", "num_key_value_groups", "head_dim", "softmax_scale", "tp_degree")
    out: dict[str, Any] = {name: getattr(block, name) for name in names}
    out["strategy"] = block.qkv_sharding_strategy.name
    out["keys"] = sorted(block.state_dict())
    out["fused keys"] = sorted(_block(flags={"fused_qkv": True}, qkv_bias=True, learned_sinks_size=1).state_dict())
    return out


@case
def overridden_hooks() -> dict[str, Any]:
    """A port's overrides are called with the stack's own arguments."""
    one_rank()
    from neuronx_distributed_inference.modules.attention.attention_base import (
        FlashAttentionStrategy,
        NeuronAttentionBase,
    )
    from neuronx_distributed_inference.modules.attention.utils import repeat_kv

    seen: dict[str, list[str]] = {}

    class Short(NeuronAttentionBase):
        def prep_qkv_tensors(self, position_ids, hidden_states, past_key_value, **kw):  # type: ignore[no-untyped-def]
            seen[f"prep {bool(self.sliding_window)} {bool(self.attention_chunk_size)}"] = sorted(kw)
            return super().prep_qkv_tensors(position_ids, hidden_states, past_key_value, **kw)

    class WithoutPolar(NeuronAttentionBase):
        def prep_qkv_tensors(  # type: ignore[no-untyped-def]
            self,
            position_ids,
            hidden_states,
            past_key_value,
            adapter_ids=None,
            cos_cache=None,
            sin_cache=None,
            rmsnorm=None,
            residual=None,
        ):
            return super().prep_qkv_tensors(position_ids, hidden_states, past_key_value)

    class Capped(NeuronAttentionBase):
        def perform_prefill(self, Q, K, V, q_len, bsz, attention_mask):  # type: ignore[no-untyped-def]
            scores = self.scaled_qk(Q, repeat_kv(K, self.num_key_value_groups), None)
            scores = torch.tanh(scores / 2) * 2
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(-1)
            return scores @ repeat_kv(V, self.num_key_value_groups), FlashAttentionStrategy.NONE

    class Turned(NeuronAttentionBase):
        def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):  # type: ignore[no-untyped-def]
            return Q.flip(-1), K.flip(-1), cos_cache, sin_cache

    near = torch.arange(WIDTH)[None, :] > torch.arange(WIDTH)[:, None] - 5
    for options in ({}, {"sliding_window": 5}, {"attention_chunk_size": 4}):
        _run(_block(Short, **options), mask=_causal() & near)
    return {
        **seen,
        "without polar": outcome(lambda: _run(_block(WithoutPolar))),
        "without polar, windowed": outcome(lambda: _run(_block(WithoutPolar, sliding_window=5))),
        **{f"capped {key}": value for key, value in _run(_block(Capped)).items()},
        **{f"turned {key}": value for key, value in _run(_block(Turned)).items()},
    }
