"""What kind of model it is, and what of it a decoder port does not translate."""

from __future__ import annotations

from typing import Any

from equiport.port.fingerprint import Fingerprint, Route
from equiport.port.fingerprint_structure import Structure
from equiport.port.source_reading_model import SourceModel

_SENSES = ("vision_config", "audio_config", "vision_tower", "speech_config", "vq_config", "image_token_id",
           "image_token_index")  # fmt: skip


def route_by_config(source: SourceModel) -> Route | None:
    """multimodal or encoder_decoder, from the config object; None for what has to be seen in the modules."""
    config = source.config
    if any(_set(getattr(config, name, None)) or _set(source.raw.get(name)) for name in _SENSES):
        return "multimodal"
    # a causal head of such a model takes the flag off its own copy of the config
    if config.is_encoder_decoder or source.raw.get("is_encoder_decoder") or _made_for_both(type(config)):
        return "encoder_decoder"
    return None


def _made_for_both(cls: type) -> bool:
    try:
        return bool(getattr(cls(), "is_encoder_decoder", False))
    except Exception:
        return False


def route_by_structure(structure: Structure) -> Route:
    """recurrent, hybrid or decoder."""
    recurrent = [bool(parts.recurrent) for parts in structure.layers]
    with_attention = [bool(parts.attention) for parts in structure.layers]
    if any(recurrent):
        return "hybrid" if any(with_attention) else "recurrent"
    if not any(with_attention):
        return "recurrent"
    return "decoder"


def outside_parts(source: SourceModel, route: Route) -> tuple[str, ...]:
    """The parts that are named and not translated, with the way seed 002 integrates them."""
    children = [
        f"{name} ({type(child).__name__})"
        for name, child in source.skeleton.named_children()
        if any(True for _ in child.parameters())
    ]
    if route == "encoder_decoder":
        return ("encoder-decoder model: encoder, cross-attention and their cache", *children)
    inner = [
        f"{path} ({type(child).__name__})"
        for path, child in source.skeleton.named_modules()
        if path.count(".") <= 1 and any(word in path for word in ("vision", "visual", "image", "audio", "projector"))
    ]
    return (f"image or audio inputs, joined by {vision_integration(source)}", *(inner or children))


def recurrent_parts(found: Fingerprint) -> tuple[str, ...]:
    """The mixers with a recurrent state, by path, class and number of layers."""
    parts = []
    for block in found.blocks:
        if block.role == "recurrent":
            parts.append(f"recurrent mixer {block.path} ({block.cls})")
    counts = sum(1 for layer in found.layers if layer.mixer == "recurrent")
    return (*parts, f"{counts} of {len(found.layers)} layers keep a recurrent state")


def vision_integration(source: SourceModel) -> str:
    """How images enter the text model: scatter (like Pixtral), cross-attention (MLlama), chunked (Llama4)."""
    text: Any = getattr(source.config, "text_config", source.config)
    if _set(getattr(text, "cross_attention_layers", None)):
        return "cross-attention (reference: MLlama)"
    if _set(getattr(text, "attention_chunk_size", None)):
        return "chunked vision flow (reference: Llama4)"
    if "masked_scatter" in source.file.read_text(encoding="utf-8"):
        return "scatter (reference: Pixtral)"
    return "a way that the source's text does not name"


def _set(value: Any) -> bool:
    return value is not None and value is not False
