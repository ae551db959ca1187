"""The source model: its config object, its concrete class, the file that class stands in, and its skeleton."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equiport.errors import EquiportError
from equiport.fixtures.folder import has_weights, read_config, tensor_headers
from equiport.reference.model import quiet_transformers, skeleton
from equiport.reference.stored_names import check_stored

_BUILD_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OSError, ImportError, RuntimeError, IndexError,
                 AssertionError, ZeroDivisionError, NotImplementedError)  # fmt: skip


@dataclass(frozen=True)
class SourceModel:
    """What is known of the model before anything is measured. `skeleton` is on the meta device."""

    folder: Path
    raw: dict[str, Any]  # config.json
    config: Any  # the config object
    skeleton: nn.Module
    file: Path  # the modeling file, as installed (expanded, not modular)
    remote: bool  # the code comes from the model's folder

    @property
    def cls(self) -> type[nn.Module]:
        """The causal-LM class."""
        return type(self.skeleton)

    @property
    def renamed(self) -> dict[str, str]:
        """The config class's attribute_map: the standard name -> the key in config.json."""
        return dict(getattr(type(self.config), "attribute_map", {}) or {})


def model_type_of(folder: Path, raw: dict[str, Any]) -> str:
    """The model_type of a config.json.

    Raises:
        EquiportError: it is missing or no text.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise EquiportError(
            "missing" if model_type is None else "must be a text",
            where=folder / "config.json",
            field="model_type",
            remedy="Add the model_type that transformers knows the architecture by.",
        )
    return model_type


def load_source(folder: Path, *, trust_remote_code: bool = False) -> SourceModel:
    """Read config.json, find the concrete class, build its skeleton on the meta device.

    Raises:
        EquiportError: no folder, no or broken config.json, an unknown model_type, code in the folder without the flag,
            or transformers cannot build the model.
    """
    raw = read_config(folder)
    model_type = model_type_of(folder, raw)
    if model_type in causal_types():
        model = skeleton(folder)
        if has_weights(folder) and not raw.get("quantization_config"):
            check_stored(model, folder)
        return SourceModel(folder, raw, model.config, model, source_file(type(model)), remote=False)
    if model_type in known_types():
        model = _other_skeleton(folder, raw)
        return SourceModel(folder, raw, model.config, model, source_file(type(model)), remote=False)
    if not isinstance(raw.get("auto_map"), dict):
        raise EquiportError(
            f"{model_type!r} is unknown to transformers {_version()}",
            where=folder / "config.json",
            field="model_type",
            remedy="Correct it, or install the transformers version that knows it.",
        )
    if not trust_remote_code:
        raise EquiportError(
            f"the model {model_type!r} brings its own code, which is not run unasked",
            where=folder / "config.json",
            field="auto_map",
            remedy="Read the code, then give --trust-remote-code.",
        )
    model = _remote_skeleton(folder)
    return SourceModel(folder, raw, model.config, model, source_file(type(model)), remote=True)


def known_types() -> frozenset[str]:
    """The model types for which the installed transformers has a config class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return frozenset(CONFIG_MAPPING_NAMES)


def causal_types() -> frozenset[str]:
    """The model types for which the installed transformers has a causal-LM class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build_config(source: SourceModel, values: dict[str, Any]) -> Any:
    """A config object of the model's class from other values."""
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    with quiet_transformers():
        return type(source.config).from_dict(values)


def build_model(source: SourceModel, config: Any, device: str = "cpu") -> nn.Module:
    """The model's class from another config object, eager attention, fp32, eval mode.

    Raises:
        EquiportError: transformers cannot build it.
    """
    with quiet_transformers(), torch.device(device):
        try:
            return source.cls._from_config(config, attn_implementation="eager").float().eval()  # type: ignore[attr-defined]
        except Exception as error:
            raise EquiportError(
                f"a small model of the same class cannot be built: {first_line(error)}",
                where=source.folder / "config.json",
            ) from error


def source_file(cls: type) -> Path:
    """The file a class stands in.

    Raises:
        EquiportError: its source is not on disk.
    """
    try:
        return Path(inspect.getfile(cls))
    except (TypeError, OSError) as error:
        raise EquiportError(f"the source of class {cls.__name__} is not on disk", remedy="Install from source.") from (
            error
        )


def place_of(cls: type) -> tuple[str, int]:
    """File (relative to the packages' folder where it stands in one) and line of a class."""
    try:
        file = source_file(cls)
        line = inspect.getsourcelines(cls)[1]
    except (EquiportError, OSError, TypeError):
        return f"{cls.__module__}", 0
    return relative_file(file), line


def relative_file(file: Path) -> str:
    """A path without the machine's part: from `site-packages` or the modules' cache on."""
    text = file.as_posix()
    for mark in ("/site-packages/", "/transformers_modules/"):
        if mark in text:
            return text.split(mark, 1)[1]
    return file.name


def stored_keys(folder: Path) -> tuple[str, ...]:
    """Names of the tensors in the folder's safetensors; empty when it has none."""
    if not has_weights(folder):
        return ()
    return tuple(header.name for header in tensor_headers(folder))


def numbered(path: str) -> str:
    """A path with `{i}` for the first number and {j} for a second."""
    seen = iter("ijkl")
    return re.sub(r"(?<=\.)\d+(?=\.|$)", lambda _: "{" + next(seen, "m") + "}", path)


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _remote_skeleton(folder: Path) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, trust_remote_code=True, attn_implementation="eager")
        except (*_BUILD_ERRORS, SyntaxError) as error:
            raise EquiportError(
                f"its own code does not build it: {first_line(error)}",
                where=folder,
                remedy="Run the model once with transformers to see what it needs.",
            ) from error


def _other_skeleton(folder: Path, raw: dict[str, Any]) -> nn.Module:
    """The model of a type that has no causal-LM class: it is named, not translated."""
    import transformers

    values = {key: value for key, value in raw.items() if key not in ("model_type", "quantization_config")}
    heads = ("AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
    said = ""
    with quiet_transformers(), torch.device("meta"):
        for head in (getattr(transformers, name, None) for name in heads):
            try:
                if head is not None:
                    config = transformers.AutoConfig.for_model(raw["model_type"], **values)
                    return head.from_config(config)
            except _BUILD_ERRORS as error:
                said = first_line(error)
    raise EquiportError(
        f"transformers cannot build {raw['model_type']!r}: {said}",
        where=folder / "config.json",
        remedy="Give a decoder-only model.",
    )


def _version() -> str:
    import transformers

    return transformers.__version__
