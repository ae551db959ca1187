"""Partition into independent units, each with its classes, primitives, instructions and contracts."""

from __future__ import annotations

from collections.abc import Sequence

from equiport.port.fingerprint import BlockContract, Fingerprint, SourceBlock
from equiport.port.plan_schema import PortUnit, SourceClass, Substitution

# unit -> (title, roles of source blocks, prefixes of block ids)
_UNITS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("attention", "Attention and its KV cache", ("attention", "qk_norm"), ("attention.", "position.alibi")),
    ("position", "Positions: rotary tables and learned tables", ("rotary", "positions"), ("rope.", "position.learned")),
    ("mlp", "Dense feed-forward block", ("mlp",), ("mlp.",)),
    ("moe", "Router and experts", ("moe",), ("moe.",)),
    ("recurrent", "Mixer with a recurrent state", ("recurrent",), ("layer.recurrent",)),
    ("embedding_norm", "Embeddings, norms and head", ("embedding", "embedding_norm", "norm", "final_norm", "lm_head"),
     ("embedding.", "norm.", "head.", "multipliers.embedding", "multipliers.logits")),
    ("layer", "Decoder layer: how the branches are added", ("layer",), ("layer.", "multipliers.residual")),
)  # fmt: skip
# block -> what to watch, each a bug that real ports had
_WATCH: dict[str, str] = {
    "attention.gqa": "The attention returns (hidden, present_kv, cos, sin): unpack four values, never index a tensor.",
    "attention.scale": "softmax_scale of the attention base is a divisor, not a factor.",
    "attention.window": "A window longer than the compiled sequence reads out of bounds; prompts longer than it must "
    "be tested, in prefill and in decode.",
    "attention.bias": "Restore biases with the same slicing and head replication as the weights, else sharding "
    "drops them.",
    "attention.qk_norm_head_after_rope": "q_layernorm= of the attention base always runs before rope.",
    "attention.qk_norm_full": "Normalise over all heads before the split; under tensor parallelism the statistics span "
    "the ranks.",
    "attention.fused_qkv_per_head": "The rows are interleaved by head: reshape before splitting.",
    "attention.fused_qkv_grouped": "Each key head's group holds its query heads, then k, then v.",
    "rope.interleaved": "Rotating halves instead of pairs gives plausible text and wrong logits.",
    "rope.partial": "The channels behind rotary_dim pass unturned.",
    "rope.dual": "cos and sin of layer i are passed to layer i + 1: a second table collapses to the first.",
    "rope.nope_layers": "Layers without rotation must not take the cos and sin that are passed along.",
    "rope.yarn": "The basic RotaryEmbedding has no scaling; scale in fp32; the attention factor acts on cos and sin.",
    "rope.longrope": "Which factors act depends on the length; the attention factor acts on cos and sin.",
    "rope.llama3": "Scale the frequencies in fp32.",
    "position.learned": "embed_tokens is called without position_ids: without an override only prefill is right.",
    "norm.rmsnorm_offset": "The factor is 1 + weight; multiply in fp32, cast last.",
    "norm.layernorm": "Keep the bias where there is one; a class named RMSNorm may compute LayerNorm.",
    "layer.post_norm": "There is no norm before the branches; the residual takes the normed branch output.",
    "layer.sandwich": "The second norm acts on the branch's output, before it is added.",
    "layer.parallel_one_norm": "Both branches read the same normed input, and their sum is added once.",
    "layer.parallel_two_norms": "Both branches read the layer's input, not the attention's result.",
    "multipliers.logits": "Padded vocabulary logits are masked after the factor.",
    "head.lm_head": "A tied lm_head is dropped from stored weights: clone the embedding explicitly.",
    "moe.softmax_topk": "Keep the router in fp32; early_expert_affinity_modulation must be False.",
    "moe.topk_softmax": "Keep the router in fp32; softmax over the chosen experts only.",
    "moe.sigmoid": "Keep the router in fp32; the correction bias acts on the choice, not on the weight.",
}


def make_units(found: Fingerprint, substitutions: Sequence[Substitution]) -> tuple[PortUnit, ...]:
    """The units of a fingerprint. A unit shares no state with another; the layer unit only composes."""
    units = []
    for kind, title, roles, prefixes in _UNITS:
        blocks = [item for item in substitutions if item.block.startswith(prefixes)]
        if not blocks:
            continue
        sources = [block for block in found.blocks if block.role in roles]
        ids = tuple(dict.fromkeys(item.block for item in blocks))
        paths = {block.path for block in sources}
        units.append(
            PortUnit(
                id=kind,
                title=title,
                kind=kind,  # type: ignore[arg-type]
                blocks=ids,
                sources=_sources(sources),
                primitives=tuple(dict.fromkeys(item.primitive for item in blocks if item.primitive)),
                instructions=_instructions(found, blocks, sources),
                watch=tuple(_WATCH[block] for block in ids if block in _WATCH),
                contracts=tuple(one for one in found.contracts if _belongs(one, paths)),
                missing_recipes=tuple(sorted({item.block for item in blocks if not item.has_recipe})),
            )
        )
    return tuple(units)


def _belongs(contract: BlockContract, paths: set[str]) -> bool:
    return contract.path in paths


def _sources(blocks: Sequence[SourceBlock]) -> tuple[SourceClass, ...]:
    classes: dict[tuple[str, str], SourceClass] = {}
    for block in blocks:
        classes.setdefault(
            (block.file, block.cls), SourceClass(cls=block.cls, file=block.file, line=block.line, path=block.path)
        )
    return tuple(classes.values())


def _instructions(
    found: Fingerprint, blocks: Sequence[Substitution], sources: Sequence[SourceBlock]
) -> tuple[str, ...]:
    lines = [f"Translate {item.block} at {item.path or 'the model'} ({item.cls}): {item.why}." for item in blocks]
    if sources:
        lines.append(
            f"Import the reference class from {sources[0].file} ({found.architecture} of transformers "
            f"{found.transformers_version}); never copy it."
        )
    lines.append("Keep the contract's shapes and dtypes; batch 2 with unequal lengths and decode steps must pass.")
    return tuple(lines)
