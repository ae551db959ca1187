"""Sequence lengths that inputs are padded to."""

from __future__ import annotations

from math import log2

from neuronx_distributed._standin.missing import attribute_hook

from neuronx_distributed_inference.models.config import InferenceConfig

__getattr__ = attribute_hook(__name__)


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """Powers of two from below `min_length` to near `max_length`, and `max_length`."""
    if min_length == max_length:
        return [max_length]
    return [2**power for power in range(int(log2(min_length)), round(log2(max_length)))] + [max_length]


def _buckets(enabled: bool, given: list[int] | None, longest: int) -> list[int]:
    if not enabled:
        return [longest]
    return given if given is not None else generate_buckets(128, longest)


def generate_buckets_for_cte(inference_config: InferenceConfig) -> list[int]:
    """Prompt lengths."""
    served = inference_config.neuron_config
    return _buckets(served.enable_bucketing, served.context_encoding_buckets, served.max_context_length)


def generate_buckets_for_tkg(inference_config: InferenceConfig) -> list[int]:
    """Cache lengths of decode steps."""
    served = inference_config.neuron_config
    return _buckets(served.enable_bucketing, served.token_generation_buckets, served.max_length)
