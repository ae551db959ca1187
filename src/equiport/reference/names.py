"""Names under which a config class keeps what others call hidden_size, num_attention_heads and so on."""

from __future__ import annotations

from collections.abc import Mapping


def attribute_names(model_type: str) -> Mapping[str, str]:
    """Common name -> the name in this model's config.json (`hidden_size` -> `n_embd`): its class's `attribute_map`.

    Empty for a type that transformers does not know.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        names = getattr(CONFIG_MAPPING[model_type], "attribute_map", {})
    except (KeyError, ImportError):
        return {}
    return dict(names)
