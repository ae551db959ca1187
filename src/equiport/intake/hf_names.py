"""What transformers calls things: model types, the classes that serve them, default configs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from equiport.errors import EquiportError

# what a class is called beyond the architecture's name
_ENDINGS = re.compile(
    r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForVisionText2Text|PreTrainedModel|Model|Config)$"
)
_SEQ2SEQ = ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",)
_VISION = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES")
_AUDIO = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
)  # fmt: skip


@dataclass(frozen=True)
class HfTasks:
    """Which tasks transformers serves a model type for."""

    causal: str | None
    seq2seq: bool
    vision: str | None
    audio: bool


def normal(name: str) -> str:
    """A name without case, dashes, dots and underscores, so that `GPTBigCode` and `gpt_bigcode` are one."""
    return re.sub(r"[\W_]+", "", name).lower()


def stem(class_name: str) -> str:
    """The architecture's name in a class name of HuggingFace or of a port, normalised."""
    bare = re.sub(r"^Neuron", "", class_name)
    bare = re.sub(r"InferenceConfig$", "Config", bare)
    return normal(_ENDINGS.sub("", bare))


def known_types() -> Mapping[str, str]:
    """model_type -> config class name, of the transformers that is here."""
    names: Mapping[str, str] = _auto("configuration_auto", "CONFIG_MAPPING_NAMES")
    return names


@cache
def types_by_class() -> dict[str, str]:
    """Class name -> model_type: the causal classes, those of images and text, and the config classes."""
    found: dict[str, str] = {}
    for task in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", *_VISION, *_SEQ2SEQ, *_AUDIO):
        for model_type, names in _auto("modeling_auto", task).items():
            for name in [names] if isinstance(names, str) else names:
                # a class that several types share belongs to the type of its own name
                if name not in found or normal(model_type) == stem(name):
                    found[name] = model_type
    for model_type, name in known_types().items():
        found.setdefault(name, model_type)
    return found


@cache
def types_by_stem() -> dict[str, frozenset[str]]:
    """Normalised architecture name -> model types that bear it."""
    found: dict[str, set[str]] = {}
    for model_type in known_types():
        found.setdefault(normal(model_type), set()).add(model_type)
    return {name: frozenset(types) for name, types in found.items()}


def tasks_of(model_type: str) -> HfTasks:
    """The tasks of one model type; all absent for a type that transformers does not have."""

    def served(*mappings: str) -> str | None:
        for mapping in mappings:
            names = _auto("modeling_auto", mapping).get(model_type)
            if names:
                return names if isinstance(names, str) else str(names[0])
        return None

    causal = served("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return HfTasks(
        # a model of text and images that AutoModelForCausalLM offers as well is no causal LM of text
        causal=None if causal is not None and causal.endswith("ForConditionalGeneration") else causal,
        seq2seq=served(*_SEQ2SEQ) is not None,
        vision=served(*_VISION),
        audio=served(*_AUDIO) is not None,
    )


def default_config(model_type: str) -> dict[str, Any]:
    """config.json of the type's config class as it is made without arguments, in the form that checkpoints have.

    Raises:
        EquiportError: transformers does not know the type, or its class wants arguments.
    """
    from transformers import AutoConfig

    from equiport.reference.model import quiet_transformers

    try:
        with quiet_transformers():
            config = AutoConfig.for_model(model_type)
            values: dict[str, Any] = config.to_diff_dict()
    except Exception as fault:  # config classes raise all kinds
        raise EquiportError(
            f"transformers has no default config of {model_type!r}: {' '.join(str(fault).split())[:200]}",
            field="model_type",
            remedy="Give the model's config.json with --model.",
        ) from fault
    values.pop("transformers_version", None)
    if values.get("head_dim", 0) is None and isinstance(values.get("hidden_size"), int):
        # some classes leave it to checkpoints
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return {**values, "model_type": model_type}


def text_type(model_type: str) -> str | None:
    """The type of the text decoder inside a model of several parts, when transformers has it as a causal LM."""
    try:
        nested = default_config(model_type).get("text_config")
    except EquiportError:
        return None
    inner = nested.get("model_type") if isinstance(nested, dict) else None
    if not isinstance(inner, str) or inner == model_type:
        return None
    return inner if tasks_of(inner).causal else None


def transformers_version() -> str:
    """For messages."""
    import transformers

    return str(transformers.__version__)


def _auto(module: str, name: str) -> Mapping[str, Any]:
    from importlib import import_module

    from equiport.reference.model import quiet_transformers

    with quiet_transformers():
        found = getattr(import_module(f"transformers.models.auto.{module}"), name, {})
    return found if isinstance(found, Mapping) else {}
