"""The fingerprint: a frozen dataclass whose fields are the architecture. Data only; it is read by fingerprint_reader.

Every facet comes from a rule over the source's own class, the instantiated skeleton and the config, never from a table
keyed by model_type. A facet that could not be established is `None` or "unknown", and an open question names it.
Paths are dotted module paths of the source model with `{i}` for the layer's number; names without a dot are attributes
of the module they stand in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

UNKNOWN = "unknown"

NormKind = Literal["rmsnorm", "layernorm", "unknown"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "unknown"]
QkvLayout = Literal["separate", "concat", "per_head", "grouped", "unknown"]
QkNormWidth = Literal["head", "full", "per_head_weights"]
QkNormPlace = Literal["before_rope", "after_rope", "unknown"]
MlpKind = Literal["gated", "ungated", "unknown"]
GateUpLayout = Literal["separate", "gate_first", "up_first", "interleaved", "unknown"]
ResidualLayout = Literal["pre_norm", "post_norm", "sandwich", "parallel_one_norm", "parallel_two_norms", "unknown"]
Route = Literal["decoder", "multimodal", "encoder_decoder", "recurrent", "hybrid", "encoder"]


@dataclass(frozen=True)
class NormFacets:
    """One normalisation class as it is used at one place."""

    path: str  # `model.layers.{i}.input_layernorm`
    cls: str
    kind: NormKind  # by what forward() computes: a class named RMSNorm may compute LayerNorm
    eps: float | None
    width: int  # normalised width; head_dim for a per-head norm
    has_weight: bool
    has_bias: bool
    weight_offset: float = 0.0  # y = n(x) * (offset + weight): 1.0 for Gemma-like norms
    # True: `(weight * n(x)).to(dtype)`, multiplied in fp32 (Gemma, OLMo2); False: `weight * n(x).to(dtype)` (Llama)
    multiply_in_fp32: bool | None = None
    normalise_in_fp32: bool = True  # statistics in fp32 although the activations are bf16


@dataclass(frozen=True)
class RopeFacets:
    """One table of rotary angles. A model with two bases (local/global) has two."""

    name: str  # "default", or the layer type it serves: "full_attention", "sliding_attention"
    path: str  # the module that makes the table: `model.rotary_emb`; "" when made inline
    cls: str
    kind: RopeKind
    theta: float
    rotary_dim: int  # channels of a head that turn; head_dim unless partial
    interleaved: bool | None  # True: pairs (0,1),(2,3); False: pairs (j, j + rotary_dim/2)
    attention_factor: float = 1.0  # cos and sin are multiplied by it (yarn, longrope)
    parameters: tuple[tuple[str, Any], ...] = ()  # the scaling parameters, verbatim


@dataclass(frozen=True)
class QkNormFacets:
    """Norms on queries and keys inside the attention."""

    q_name: str  # `q_norm`; "" when it has no module
    k_name: str
    place: QkNormPlace
    width: QkNormWidth  # head: one weight [head_dim]; full: [heads * head_dim] before the split; or a weight per head
    norm: NormFacets
    layers: tuple[int, ...] = ()  # where it acts


@dataclass(frozen=True)
class AttentionFacets:
    """The attention core shared by all attention layers; what differs by layer is in `LayerFacets`."""

    name: str  # attribute in the layer: `self_attn`
    cls: str
    num_heads: int
    num_kv_heads: int  # 1: MQA; == num_heads: MHA
    head_dim: int  # may differ from hidden_size / num_heads
    # how q, k and v come out of their projection:
    #   separate   q_proj, k_proj, v_proj
    #   concat     [ all q | all k | all v ]                      (phi3; falcon MQA)
    #   per_head   [ q0 k0 v0 | q1 k1 v1 | ... ]                  (gpt_neox; bloom; falcon MHA)
    #   grouped    [ q0 .. qn k0 v0 | ... ] one group per kv head (falcon, new decoder architecture)
    qkv_layout: QkvLayout
    q_name: str  # names of the source's projections; all three equal the fused one's name where fused
    k_name: str
    v_name: str
    o_name: str
    q_bias: bool
    k_bias: bool
    v_bias: bool
    o_bias: bool
    scale: float | None  # softmax(q @ k.T * scale)
    scale_source: str  # "head_dim" or the config key it comes from: `query_pre_attn_scalar`, `attention_multiplier`
    softcap: float | None = None  # cap * tanh(scores / cap)
    clip_qkv: float | None = None
    sinks_name: str = ""  # parameter of a learned logit per head in the softmax's denominator
    qk_norm: QkNormFacets | None = None
    alibi: bool = False
    extras: tuple[
        str, ...
    ] = ()  # parameters or modules that no facet accounts for: an output gate, a latent projection
    latent: bool = False  # multi-head latent attention (kv_a/kv_b projections)


@dataclass(frozen=True)
class MlpFacets:
    """A dense feed-forward block."""

    name: str  # attribute in the layer: `mlp`; "" when the projections stand in the layer itself
    cls: str
    kind: MlpKind
    layout: GateUpLayout  # of gate and up; `separate` for an ungated MLP
    activation: str  # the name that decides: "silu", "gelu", "gelu_pytorch_tanh", "relu2", "xielu"
    intermediate_size: int
    gate_name: str  # "" when ungated; equals up_name when fused
    up_name: str
    down_name: str
    up_bias: bool  # gate and up
    down_bias: bool
    activation_parameters: tuple[str, ...] = ()  # learned parameters of the activation (xIELU)


@dataclass(frozen=True)
class MoeFacets:
    """A mixture-of-experts block: described, so that it can be named."""

    name: str
    cls: str
    router_path: str
    router_kind: str  # "softmax_topk", "topk_softmax", "sigmoid", "sparsemixer", "unknown"
    num_experts: int
    experts_per_token: int | None
    renormalised: bool | None
    shared_expert: str  # attribute's name, "" without
    correction_bias: bool
    expert_layout: str  # "modules" or "stacked"
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerFacets:
    """What one layer is. Layers of a homogeneous model are all equal."""

    index: int
    mixer: Literal["attention", "recurrent", "none"]
    mixer_name: str  # attribute: `self_attn`, `mamba`
    mlp: Literal["dense", "moe", "none"]
    window: int | None = None  # sliding window in tokens that this layer applies
    rope: str = ""  # name of its `RopeFacets`; "" = no rotation in this layer (NoPE)
    layer_type: str = ""  # the source's own word, where it has one


@dataclass(frozen=True)
class LayerNorms:
    """Where the norms of a layer stand; attribute names in the layer, "" where there is none.

    pre_norm:    x += attn(attn_in(x));            x += mlp(mlp_in(x))
    post_norm:   x += attn_out(attn(x));           x += mlp_out(mlp(x))
    sandwich:    x += attn_out(attn(attn_in(x)));  x += mlp_out(mlp(mlp_in(x)))
    parallel:    x += attn(attn_in(x)) + mlp(mlp_in(x)); one norm: mlp_in equals attn_in
    """

    attn_in: str = ""
    attn_out: str = ""
    mlp_in: str = ""
    mlp_out: str = ""


@dataclass(frozen=True)
class Multipliers:
    """Constant factors; 1.0 where there is none. `*_source` is the config key (or expression) it comes from."""

    embedding: float = 1.0  # times the token embeddings
    embedding_source: str = ""
    embedding_rounded: bool = False  # the factor itself is rounded to the activations' dtype first (Gemma)
    residual: float = 1.0  # times each branch before it is added
    residual_source: str = ""
    logits: float = 1.0  # logits * factor; a divisor is given as its inverse
    logits_source: str = ""


@dataclass(frozen=True)
class SourceNames:
    """Module paths in the source. Weight keys follow from them."""

    backbone: str  # `model`, `transformer`, `gpt_neox`
    layers: str  # `model.layers`
    embedding: str  # `model.embed_tokens`
    final_norm: str  # `model.norm`; "" without
    lm_head: str  # `lm_head`, `embed_out`
    rotary: str = ""  # `model.rotary_emb`
    positions: str = ""  # learned absolute positions: `transformer.wpe`
    embedding_norm: str = ""  # a norm on the embeddings


@dataclass(frozen=True)
class ConfigKey:
    """One config attribute that the modeling source reads."""

    name: str
    value: Any
    # verbatim: stands in config.json; default: from the config class; renamed: by attribute_map;
    # computed: made at construction of the config object
    origin: Literal["verbatim", "default", "renamed", "computed"]
    facet: str  # the field of the fingerprint that accounts for it; "" when none does
    stands_for: str = ""  # renamed: the key in config.json


@dataclass(frozen=True)
class SourceBlock:
    """A block of the source: where its class stands."""

    role: str  # layer, attention, mlp, moe, norm, embedding, rotary, lm_head, mixer, model
    path: str
    cls: str
    file: str  # file of the class, relative to site-packages (`transformers/models/llama/modeling_llama.py`)
    line: int
    facets: tuple[str, ...] = ()  # in words, for the inventory


@dataclass(frozen=True)
class OpenQuestion:
    """Something that the three sources do not agree on, or that none of them settles."""

    id: str  # stable: `attention.scale`, `config.my_new_key`
    question: str
    evidence: tuple[str, ...]  # what each source says
    choices: tuple[str, ...]  # accepted answers; empty: free text
    facet: str = ""  # the field that an answer sets


@dataclass(frozen=True)
class TensorSpec:
    """One tensor at a block's border. `shape` in symbols where they are known: ("B", "T", "hidden_size")."""

    name: str
    shape: tuple[str, ...]
    dtype: str  # "activations" for the model's own dtype, else torch's name


@dataclass(frozen=True)
class BlockContract:
    """What a source block takes and gives, seen when it ran on a small model."""

    path: str
    cls: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Fingerprint:
    """The architecture. See the module's docstring for what its paths mean."""

    model_type: str
    architecture: str  # class of the reference model: `LlamaForCausalLM`
    source_file: str  # its modeling file, relative to site-packages
    transformers_version: str
    route: Route
    # --- dimensions
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    # --- the stack of layers
    names: SourceNames
    layers: tuple[LayerFacets, ...]
    residual: ResidualLayout
    layer_norms: LayerNorms
    norms: tuple[NormFacets, ...]  # one an occurrence: each place in the layer, the final norm
    attention: AttentionFacets | None
    ropes: tuple[RopeFacets, ...]
    mlp: MlpFacets | None
    moe: MoeFacets | None
    # --- around the layers
    multipliers: Multipliers = Multipliers()
    tied_embeddings: bool = False  # lm_head.weight is the embedding's
    lm_head_bias: bool = False
    logits_softcap: float | None = None
    learned_positions: bool = False
    position_offset: int = 0  # row of the learned table that position 0 takes (OPT: 2)
    # --- where it comes from
    config_keys: tuple[ConfigKey, ...] = ()
    blocks: tuple[SourceBlock, ...] = ()
    state_dict_keys: tuple[str, ...] = ()  # with {i} for layer numbers
    contracts: tuple[BlockContract, ...] = ()
    unread_keys: tuple[str, ...] = ()  # keys of config.json that the modeling source does not read
    unsupported: tuple[str, ...] = ()  # named parts that have no facet: "vision tower model.visual (…)"
    questions: tuple[OpenQuestion, ...] = field(default=())

    def norm_at(self, path: str) -> NormFacets | None:
        """The norm at a module path with `{i}`, or at a layer attribute's name; None when there is none."""
        full = {path, f"{self.names.layers}.{{i}}.{path}"}
        return next((norm for norm in self.norms if norm.path in full), None)

    @property
    def final_norm(self) -> NormFacets | None:
        """The norm before the head."""
        return self.norm_at(self.names.final_norm) if self.names.final_norm else None
