"""Which blocks a fingerprint is made of, each with the facet that asks for it and the stack's primitive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from equiport.errors import EquiportError
from equiport.port.fingerprint import AttentionFacets, Fingerprint, MoeFacets, NormFacets
from equiport.port.plan_blocks import BLOCKS

_ATTENTION = "NeuronAttentionBase (modules.attention.attention_base)"
_COLUMN_ROW = "ColumnParallelLinear, RowParallelLinear (parallel_layers.layers)"
_ROPE = "RotaryEmbedding (modules.attention.utils)"
_MOE = "initialize_moe_module (modules.moe_v2)"
# block -> the stack's primitive; a block that is not here has none
PRIMITIVES: dict[str, dict[str, str]] = {
    "nxdi": {
        "norm.rmsnorm": "CustomRMSNorm (modules.custom_calls), a plain module in CPU mode",
        "norm.rmsnorm_offset": "own module: the weight is stored as 1 + w, or added in forward",
        "norm.rmsnorm_weightless": "own module",
        "norm.layernorm": "torch.nn.LayerNorm",
        "norm.layernorm_offset": "own module",
        "norm.layernorm_weightless": "torch.nn.LayerNorm(elementwise_affine=False)",
        "rope.default": _ROPE,
        "rope.linear": f"{_ROPE}, scaled in an own subclass",
        "rope.dynamic": f"{_ROPE}, scaled in an own subclass",
        "rope.llama3": "Llama3RotaryEmbedding (models.llama.modeling_llama)",
        "rope.yarn": f"{_ROPE}, scaled in an own subclass",
        "rope.longrope": f"{_ROPE}, scaled in an own subclass",
        "rope.proportional": f"{_ROPE}, scaled in an own subclass",
        "rope.partial": "override of apply_rotary_embedding",
        "rope.interleaved": "override of apply_rotary_embedding",
        "rope.dual": "override of get_model_output or a table in each attention: cos and sin pass from layer to layer",
        "rope.nope_layers": "an attention without rotary_emb in those layers",
        "position.learned": "ParallelEmbedding and an override of get_model_output",
        "attention.gqa": _ATTENTION,
        "attention.fused_qkv_concat": f"{_ATTENTION} with fused_qkv=True: the projection stays fused",
        "attention.fused_qkv_per_head": f"{_ATTENTION}; rows regrouped into q, k and v in the weight conversion",
        "attention.fused_qkv_grouped": f"{_ATTENTION}; split in the weight conversion",
        "attention.bias": "qkv_bias=, o_bias= of NeuronAttentionBase",
        "attention.scale": "softmax_scale= of NeuronAttentionBase, which is a divisor",
        "attention.softcap": "override of the score computation",
        "attention.window": "sliding_window= of NeuronAttentionBase",
        "attention.sinks": "learned_sinks of NeuronAttentionBase",
        "attention.clip_qkv": "clip_qkv= of NeuronAttentionBase",
        "attention.qk_norm_head": "q_layernorm=, k_layernorm= of NeuronAttentionBase, before rope",
        "attention.qk_norm_head_after_rope": "override of prep_qkv_tensors",
        "attention.qk_norm_full": "override of prep_qkv_tensors; the norm spans all ranks",
        "attention.qk_norm_per_head_weights": "override of prep_qkv_tensors",
        "mlp.gated": _COLUMN_ROW,
        "mlp.gated_fused": f"{_COLUMN_ROW}: one fused gate and up projection, its output halved",
        "mlp.gated_fused_up_first": f"{_COLUMN_ROW}; split in the weight conversion",
        "mlp.gated_fused_interleaved": f"{_COLUMN_ROW}; split in the weight conversion",
        "mlp.ungated": _COLUMN_ROW,
        "moe.softmax_topk": _MOE,
        "moe.topk_softmax": _MOE,
        "moe.sigmoid": _MOE,
        "moe.shared_expert": _MOE,
        "layer.pre_norm": "own decoder layer",
        "layer.post_norm": "own decoder layer",
        "layer.sandwich": "own decoder layer",
        "layer.parallel_one_norm": "own decoder layer",
        "layer.parallel_two_norms": "own decoder layer",
        "multipliers.embedding": "override of get_model_output, or an embedding subclass",
        "multipliers.residual": "in the own decoder layer",
        "multipliers.logits": "a scaled lm_head",
        "embedding.tokens": "ParallelEmbedding (parallel_layers.layers)",
        "embedding.norm": "override of get_model_output",
        "head.lm_head": "ColumnParallelLinear (parallel_layers.layers)",
        "head.bias": "ColumnParallelLinear(bias=True), padded with the vocabulary",
        "head.softcap": "an lm_head that caps its logits",
    }
}


@dataclass(frozen=True)
class PlacedBlock:
    """A block at its place in the source."""

    block: str
    path: str
    cls: str
    why: str


def primitives_of(stack: str) -> dict[str, str]:
    """The stack's primitives by block.

    Raises:
        EquiportError: nothing is known of this stack.
    """
    if stack not in PRIMITIVES:
        raise EquiportError(
            f"no plan can be made for stack {stack!r}",
            field="--stack",
            remedy=f"Stacks that can be planned for: {', '.join(sorted(PRIMITIVES))}.",
        )
    return PRIMITIVES[stack]


def placed_blocks(found: Fingerprint) -> tuple[PlacedBlock, ...]:
    """The blocks that a decoder is made of, in the order in which a token meets them, each id once a place."""
    if found.route != "decoder":
        return tuple(_recurrent(found))
    makers = (_embedding, _norms, _ropes, _attention, _feed_forward, _layer, _head)
    blocks = [block for make in makers for block in make(found)]
    unknown = {block.block for block in blocks} - set(BLOCKS)
    assert not unknown, unknown
    return tuple(dict.fromkeys(blocks))


def norm_block(norm: NormFacets) -> str:
    """The block id of a norm."""
    if norm.kind == "unknown":
        return "layer.unknown"
    if not norm.has_weight:
        return f"norm.{norm.kind}_weightless"
    return f"norm.{norm.kind}_offset" if norm.weight_offset else f"norm.{norm.kind}"


def _recurrent(found: Fingerprint) -> Iterator[PlacedBlock]:
    for block in found.blocks:
        if block.role == "recurrent":
            yield PlacedBlock("layer.recurrent", block.path, block.cls, "a mixer that keeps a recurrent state")
    if found.moe:
        yield from _moe(found, found.moe)


def _cls(found: Fingerprint, role: str) -> str:
    return next((block.cls for block in found.blocks if block.role == role), "")


def _embedding(found: Fingerprint) -> Iterator[PlacedBlock]:
    names, factor = found.names, found.multipliers
    yield PlacedBlock("embedding.tokens", names.embedding, _cls(found, "embedding"), f"{found.vocab_size} tokens")
    if factor.embedding != 1.0:
        why = f"times {factor.embedding:g} ({factor.embedding_source})"
        yield PlacedBlock("multipliers.embedding", names.embedding, _cls(found, "embedding"), why)
    if found.learned_positions:
        why = f"position 0 takes row {found.position_offset}"
        yield PlacedBlock("position.learned", names.positions, _cls(found, "positions"), why)
    if names.embedding_norm:
        yield PlacedBlock("embedding.norm", names.embedding_norm, _cls(found, "embedding_norm"), "norm on embeddings")


def _norms(found: Fingerprint) -> Iterator[PlacedBlock]:
    for norm in found.norms:
        order = {True: "weight multiplied in fp32", False: "weight multiplied after the cast", None: "no weight"}
        why = f"eps {norm.eps:g}, {order[norm.multiply_in_fp32]}" if norm.eps is not None else "no eps"
        yield PlacedBlock(norm_block(norm), norm.path, norm.cls, why)


def _ropes(found: Fingerprint) -> Iterator[PlacedBlock]:
    head_dim = found.attention.head_dim if found.attention else 0
    for rope in found.ropes:
        if rope.kind == "unknown":
            yield PlacedBlock("layer.unknown", rope.path, rope.cls, "frequencies of no known kind")
            continue
        yield PlacedBlock(f"rope.{rope.kind}", rope.path, rope.cls, f"{rope.name}: base {rope.theta:g}")
        if 0 < rope.rotary_dim < head_dim:
            why = f"{rope.rotary_dim} of {head_dim} channels turn"
            yield PlacedBlock("rope.partial", rope.path, rope.cls, why)
        if rope.interleaved:
            yield PlacedBlock("rope.interleaved", rope.path, rope.cls, "pairs (0,1), (2,3)")
    tables = {(rope.kind, rope.theta, rope.parameters, rope.rotary_dim) for rope in found.ropes}
    if len(tables) > 1:
        yield PlacedBlock("rope.dual", found.ropes[0].path, found.ropes[0].cls, f"{len(tables)} different tables")
    still = [layer.index for layer in found.layers if layer.mixer == "attention" and not layer.rope]
    if found.ropes and still:
        why = f"{len(still)} of {len(found.layers)} layers do not rotate, first {still[0]}"
        yield PlacedBlock("rope.nope_layers", f"{found.names.layers}.{{i}}", found.ropes[0].cls, why)


def _attention(found: Fingerprint) -> Iterator[PlacedBlock]:
    a = found.attention
    if a is None:
        return
    path = f"{found.names.layers}.{{i}}.{a.name}"

    def block(name: str, why: str) -> PlacedBlock:
        return PlacedBlock(f"attention.{name}", path, a.cls, why)

    if a.latent:
        yield block("latent", f"projections {', '.join(a.extras)}")
        return
    if a.extras or a.scale is None:
        yield block("extra", f"parts that no facet describes: {', '.join(a.extras) or 'the formula does not fit'}")
    yield block("gqa", f"{a.num_heads} query heads, {a.num_kv_heads} key heads of {a.head_dim}")
    if a.qkv_layout not in ("separate", "unknown"):
        yield block(f"fused_qkv_{a.qkv_layout}", f"{a.q_name} holds q, k and v")
    yield from _attention_switches(found, a, block)


def _attention_switches(found: Fingerprint, a: AttentionFacets, block: object) -> Iterator[PlacedBlock]:
    assert callable(block)
    biased = [name for name in ("q", "k", "v", "o") if getattr(a, f"{name}_bias")]
    if biased:
        yield block("bias", f"on {', '.join(biased)}")
    if a.scale is not None and a.head_dim and abs(a.scale - a.head_dim**-0.5) > 1e-9:
        yield block("scale", f"scores times {a.scale:g} ({a.scale_source})")
    if a.softcap is not None:
        yield block("softcap", f"scores capped at {a.softcap:g}")
    windows = sorted({layer.window for layer in found.layers if layer.window})
    if windows:
        count = sum(1 for layer in found.layers if layer.window)
        yield block("window", f"window {windows[0]} in {count} of {len(found.layers)} layers")
    if a.sinks_name:
        yield block("sinks", f"parameter {a.sinks_name}")
    if a.clip_qkv is not None:
        yield block("clip_qkv", f"q, k and v clamped to {a.clip_qkv:g}")
    if a.alibi:
        yield PlacedBlock(
            "position.alibi", f"{found.names.layers}.{{i}}.{a.name}", a.cls, "linear biases on the scores"
        )
    if a.qk_norm:
        width = f"qk_norm_{a.qk_norm.width}"
        if a.qk_norm.place == "after_rope" and a.qk_norm.width == "head":
            width += "_after_rope"
        yield block(width, f"{a.qk_norm.q_name}, {a.qk_norm.k_name}: {a.qk_norm.norm.kind}, {a.qk_norm.place}")
        path = f"{found.names.layers}.{{i}}.{a.name}.{a.qk_norm.q_name}"
        yield PlacedBlock(norm_block(a.qk_norm.norm), path, a.qk_norm.norm.cls, f"width {a.qk_norm.norm.width}")


def _feed_forward(found: Fingerprint) -> Iterator[PlacedBlock]:
    m = found.mlp
    if m is not None:
        path = f"{found.names.layers}.{{i}}" + (f".{m.name}" if m.name else "")
        kinds = {"gate_first": "gated_fused", "up_first": "gated_fused_up_first",
                 "interleaved": "gated_fused_interleaved"}  # fmt: skip
        name = "ungated" if m.kind == "ungated" else kinds.get(m.layout, "gated")
        yield PlacedBlock(f"mlp.{name}", path, m.cls, f"{m.activation}, width {m.intermediate_size}")
        if m.activation_parameters:
            yield PlacedBlock("mlp.learned_activation", path, m.cls, ", ".join(m.activation_parameters))
    if found.moe:
        yield from _moe(found, found.moe)


def _moe(found: Fingerprint, moe: MoeFacets) -> Iterator[PlacedBlock]:
    path = f"{found.names.layers}.{{i}}.{moe.name}"
    kind = f"moe.{moe.router_kind}" if f"moe.{moe.router_kind}" in BLOCKS else "moe.unknown"
    why = f"{moe.num_experts} experts, {moe.experts_per_token} a token, router {moe.router_kind}"
    if moe.correction_bias:
        why += ", correction bias"
    yield PlacedBlock(kind, path, moe.cls, f"{why}, in {len(moe.layers)} of {len(found.layers)} layers")
    if moe.shared_expert:
        yield PlacedBlock("moe.shared_expert", f"{path}.{moe.shared_expert}", moe.cls, "every token takes it")


def _layer(found: Fingerprint) -> Iterator[PlacedBlock]:
    norms = found.layer_norms
    places = {"attn_in": norms.attn_in, "attn_out": norms.attn_out, "mlp_in": norms.mlp_in, "mlp_out": norms.mlp_out}
    why = ", ".join(f"{place} {name}" for place, name in places.items() if name) or "no place of a norm was found"
    path = f"{found.names.layers}.{{i}}"
    yield PlacedBlock(f"layer.{found.residual}", path, _cls(found, "layer"), why)
    if found.multipliers.residual != 1.0:
        why = f"branches times {found.multipliers.residual:g} ({found.multipliers.residual_source})"
        yield PlacedBlock("multipliers.residual", path, _cls(found, "layer"), why)


def _head(found: Fingerprint) -> Iterator[PlacedBlock]:
    path, cls = found.names.lm_head, _cls(found, "lm_head")
    yield PlacedBlock(
        "head.lm_head", path, cls, "tied to the embedding" if found.tied_embeddings else "weights of its own"
    )
    if found.lm_head_bias:
        yield PlacedBlock("head.bias", path, cls, "a bias on the logits")
    if found.multipliers.logits != 1.0:
        why = f"logits times {found.multipliers.logits:g} ({found.multipliers.logits_source})"
        yield PlacedBlock("multipliers.logits", path, cls, why)
    if found.logits_softcap is not None:
        yield PlacedBlock("head.softcap", path, cls, f"logits capped at {found.logits_softcap:g}")
