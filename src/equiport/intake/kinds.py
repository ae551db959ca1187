"""Kinds of ports, how they are told apart, and what equiport validates of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from equiport.intake.hf_names import HfTasks
from equiport.intake.port_text import PortText


class PortKind(str, Enum):
    """What a port is, for validation."""

    DECODER = "decoder"
    MOE = "MoE decoder"
    HYBRID = "hybrid or recurrent decoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION = "vision-language"
    AUDIO = "audio"
    DIFFUSION = "diffusion"
    EMBEDDING = "embedding or classifier"
    UNKNOWN = "unknown"

    @property
    def runs(self) -> bool:
        """Whether the stages run on it: it gives next-token logits of text."""
        return self in (PortKind.DECODER, PortKind.MOE, PortKind.HYBRID)


_LOGITS = (
    "every mapped component, bf16 and fp32, against the source (stages 0 and 2)",
    "next-token logits, teacher forced, prefill and decode on ragged rows (stages 1, 5 and 6)",
)
_COSINE = (
    "not run by the stages; `equiport embeddings` does it, with the vectors of a server or of a file: cosine of target "
    "and source above 0.999 for each of a diverse set of prompts, unrelated prompts as far apart as the source has "
    "them, and a prompt alone against the same one in a batch at 1.000000"
)
#: kind -> (what is validated, what is not)
SCOPE: Mapping[PortKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    PortKind.DECODER: (_LOGITS, ()),
    PortKind.MOE: (
        _LOGITS,
        ("tokens whose routing is a near tie: they are set aside, and INCONCLUSIVE is given above 10 % of them",),
    ),
    PortKind.HYBRID: (
        _LOGITS,
        (
            "recurrent state (SSM, convolution, linear attention) is compared through its effect on outputs alone; "
            "states of reused cache rows and of padded prompts are seen only as far as logits show them",
        ),
    ),
    PortKind.ENCODER_DECODER: (
        (),
        ("encoder, cross-attention and the decoder that depends on them: the stages feed text to a causal LM",),
    ),
    PortKind.VISION: (
        (),
        ("vision encoder, projector, the merging of image features and positions of images",),
    ),
    PortKind.AUDIO: ((), ("audio encoder, codec and everything that takes or gives waveforms",)),
    PortKind.DIFFUSION: ((), ("denoiser, schedule, autoencoder: there are no next-token logits to compare",)),
    PortKind.EMBEDDING: ((), (_COSINE,)),
    PortKind.UNKNOWN: ((), ("no class of a kind that equiport knows was found",)),
}
TEXT_DECODER = "of a model of several parts: its text decoder, as a causal LM of its own"

_NAMES = {
    PortKind.DIFFUSION: re.compile(r"Diffusion|Denois|DiT\b|UNet|AutoencoderKL|VAE|VideoTransformer|FlowMatching"),
    PortKind.AUDIO: re.compile(r"Wav2Vec|Whisper|Audio(?!LLM)|Speech|Mel\b|Codec|Vocoder|Laughter|Song"),
    PortKind.VISION: re.compile(
        r"Vision|ViT(?![a-z])|Siglip|CLIP|Pixel|Image|PatchEmbed|Perceiver|VL(?=Model|For|Config|$)"
    ),
}
_RECURRENT_CLASS = re.compile(r"Mamba|SSM|RG?LRU|Recurrent|ShortConv|DeltaNet|LinearAttention|Rwkv|RWKV|GatedDelta")
_RECURRENT_KEYS = re.compile(
    r"^(mamba_|ssm_|conv_L_cache$|lru_width$|linear_(conv|key|value|num)|time_step_|rwkv|hybrid_)"
)
_LAYER_KEYS = ("layer_types", "block_types", "layers_block_type")
_RECURRENT_LAYERS = {"conv", "linear_attention", "recurrent", "mamba", "mamba2", "rwkv"}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_EXPERT_CLASS = re.compile(r"MoE|Moe[A-Z]|Experts?(?![a-z])|Router(?![a-z])")
_ENCODER_CLASS = re.compile(r"Embedding(Model|s?For)|Encoder(Model)?$|Classif|ForSequence|ForToken|Pool(er|ing)|Rerank")


def kind_of(text: PortText, config: Mapping[str, Any] | None, tasks: HfTasks | None, *, causal: bool) -> PortKind:
    """The kind, from what the port's file defines and imports, and from its counterpart's config and tasks.

    `causal`: the port has a class that gives next-token logits, or the inner model of one.
    """
    names = " ".join((*text.class_names, *text.from_transformers))
    stated = " ".join(text.lines.get(key, "") for key in ("model type", "architecture"))
    if not causal:
        return _without_logits(text, names, stated)
    if _NAMES[PortKind.DIFFUSION].search(names) and "diffusers" in text.roots:
        return PortKind.DIFFUSION
    only_text = tasks is not None and tasks.causal is not None
    if _NAMES[PortKind.VISION].search(names) or (not only_text and _has_part(config, "vision_config")):
        return PortKind.VISION
    if not only_text and ((tasks is not None and tasks.audio) or _has_part(config, "audio_config")):
        return PortKind.AUDIO
    if not only_text and ((tasks is not None and tasks.seq2seq) or (config or {}).get("is_encoder_decoder")):
        return PortKind.ENCODER_DECODER
    if _recurrent(config) or _RECURRENT_CLASS.search(" ".join(text.class_names)):
        return PortKind.HYBRID
    if _has_experts(text, config):
        return PortKind.MOE
    return PortKind.DECODER


def _has_part(config: Mapping[str, Any] | None, part: str) -> bool:
    """Whether the config, or one nested in it, has a part such as vision_config."""
    if config is None:
        return False
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    return isinstance(config.get(part), Mapping) or any(_has_part(inner, part) for inner in nested)


def _recurrent(config: Mapping[str, Any] | None) -> bool:
    if config is None:
        return False
    layers = [
        *_listed(config.get("layer_types")),
        *_listed(config.get("block_types")),
        *_listed(config.get("layers_block_type")),
    ]
    if layers:
        return bool(_RECURRENT_LAYERS & set(layers))
    return any(_RECURRENT_KEYS.match(key) and value not in (None, False, 0) for key, value in config.items())


def _listed(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, (list, tuple)) else []


def _has_experts(text: PortText, config: Mapping[str, Any] | None) -> bool:
    if config is not None:
        return any(isinstance(config.get(key), int) and config[key] > 1 for key in _EXPERT_KEYS)
    return bool(_EXPERT_CLASS.search(" ".join(text.class_names))) or "initialize_moe_module" in text.source.imports


def _without_logits(text: PortText, names: str, stated: str) -> PortKind:
    said = f"{names} {stated}"
    for kind in (PortKind.AUDIO, PortKind.VISION, PortKind.DIFFUSION):
        if kind is PortKind.DIFFUSION and (re.search(r"diffusion", stated, re.I) or "diffusers" in text.roots):
            return kind
        if _NAMES[kind].search(said):
            return kind
    return PortKind.EMBEDDING if _ENCODER_CLASS.search(names) else PortKind.UNKNOWN
