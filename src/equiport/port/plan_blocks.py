"""Block ids: the words in which a plan asks for recipes. A recipe of id `norm.rmsnorm` lives in the folder
`templates/recipes/<stack>/norm_rmsnorm/`.
"""

from __future__ import annotations

from equiport.content import content_dir
from equiport.errors import EquiportError

# id -> what it is. An id stands for what has to be translated, parameters come from the fingerprint.
BLOCKS: dict[str, str] = {
    # --- norms
    "norm.rmsnorm": "x / rms(x) * w",
    "norm.rmsnorm_offset": "x / rms(x) * (1 + w)",
    "norm.rmsnorm_weightless": "x / rms(x)",
    "norm.layernorm": "LayerNorm with weight, with or without bias",
    "norm.layernorm_offset": "LayerNorm with (1 + w)",
    "norm.layernorm_weightless": "LayerNorm without weight and bias",
    # --- rotary tables (kind of frequencies) and how they are applied
    "rope.default": "theta^(-2j/d)",
    "rope.linear": "positions divided by a factor",
    "rope.dynamic": "base grows with the length",
    "rope.llama3": "frequencies scaled by wavelength",
    "rope.yarn": "frequencies blended, attention factor",
    "rope.longrope": "short and long factors, attention factor",
    "rope.proportional": "part of the frequencies is zero",
    "rope.partial": "only the first rotary_dim channels turn",
    "rope.interleaved": "pairs (0,1),(2,3) instead of halves",
    "rope.dual": "one table per layer type",
    "rope.nope_layers": "some layers do not rotate",
    "position.learned": "a learned table of absolute positions",
    "position.alibi": "linear biases on the scores",
    # --- attention
    "attention.gqa": "MHA, GQA or MQA with separate projections",
    "attention.fused_qkv_concat": "one projection [all q | all k | all v]",
    "attention.fused_qkv_per_head": "one projection [q0 k0 v0 | q1 k1 v1 ...]",
    "attention.fused_qkv_grouped": "one projection [q.. k v] per kv head",
    "attention.bias": "biases on q, k, v or o",
    "attention.scale": "a scale other than head_dim^-0.5",
    "attention.softcap": "cap * tanh(scores / cap)",
    "attention.window": "sliding window, on all or some layers",
    "attention.sinks": "a learned logit per head in the denominator",
    "attention.clip_qkv": "q, k, v clamped",
    "attention.qk_norm_head": "norm over head_dim, before rope",
    "attention.qk_norm_head_after_rope": "norm over head_dim, after rope",
    "attention.qk_norm_full": "norm over all heads before the split",
    "attention.qk_norm_per_head_weights": "one norm weight per head",
    "attention.latent": "multi-head latent attention",
    "attention.extra": "attention parameters that no facet describes",
    # --- feed-forward
    "mlp.gated": "down(act(gate(x)) * up(x))",
    "mlp.gated_fused": "gate and up in one projection, gate first",
    "mlp.gated_fused_up_first": "gate and up in one projection, up first",
    "mlp.gated_fused_interleaved": "gate and up interleaved in one projection",
    "mlp.ungated": "down(act(up(x)))",
    "mlp.learned_activation": "an activation with parameters",
    "moe.softmax_topk": "softmax, then top-k",
    "moe.topk_softmax": "top-k, then softmax",
    "moe.sigmoid": "sigmoid scores, with or without correction bias",
    "moe.unknown": "a router of another kind",
    "moe.shared_expert": "an expert that every token takes",
    # --- layers and the whole
    "layer.pre_norm": "norm before each branch",
    "layer.post_norm": "norm on each branch's output only",
    "layer.sandwich": "norm before and after each branch",
    "layer.parallel_one_norm": "attention and MLP in parallel from one norm",
    "layer.parallel_two_norms": "attention and MLP in parallel from two norms",
    "layer.recurrent": "a mixer with a recurrent state",
    "layer.unknown": "a layer of another shape",
    "multipliers.embedding": "embeddings times a constant",
    "multipliers.residual": "branches times a constant",
    "multipliers.logits": "logits times a constant",
    "embedding.tokens": "token embeddings",
    "embedding.norm": "a norm on the embeddings",
    "head.lm_head": "final norm and projection to the vocabulary, tied or not",
    "head.bias": "a bias on the projection to the vocabulary",
    "head.softcap": "cap * tanh(logits / cap)",
}


def folder_of(block: str) -> str:
    """Folder name of a block's recipe."""
    return block.replace(".", "_")


def available_recipes(stack: str) -> frozenset[str]:
    """Ids of the blocks that have a recipe folder for `stack`."""
    try:
        root = content_dir("templates") / "recipes" / stack
    except EquiportError:
        return frozenset()
    if not root.is_dir():
        return frozenset()
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    return frozenset(block for block in BLOCKS if folder_of(block) in folders)
