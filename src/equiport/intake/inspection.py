"""`inspect_port`: what a port is, without running it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError, OpenQuestionError
from equiport.fixtures.folder import read_config
from equiport.fixtures.tiny_config import tiny_config
from equiport.intake import hf_names
from equiport.intake.counterpart import Counterpart, find_counterpart
from equiport.intake.kinds import SCOPE, TEXT_DECODER, PortKind, kind_of
from equiport.intake.port_text import PortText, needed_modules, read_port_text
from equiport.reference.names import attribute_names
from equiport.stacks.port_classes import PortClasses, Role, class_roles, find_port_classes

# packages of a serving stack: whether they are here is the adapter's to say
_STACK_ROOTS = frozenset(
    ("neuronx_distributed", "neuronx_distributed_inference", "torch_neuronx", "torch_xla", "libneuronxla", "neuronxcc",
     "nki", "nkilib", "vllm_neuron", "vllm")
)  # fmt: skip


@dataclass(frozen=True)
class PortInspection:
    """What is known of a port. `tiny` is the config.json of the model that stands for it in fixtures.

    `obstacle` says why the stages cannot run; None when nothing that can be read stands against it.
    """

    port: Path
    kind: PortKind
    classes: PortClasses | None
    model_type: str | None
    hf_class: str | None
    tiny: dict[str, Any] | None
    notes: tuple[str, ...]
    validated: tuple[str, ...]
    not_validated: tuple[str, ...]
    obstacle: str | None


def inspect_port(
    port: Path,
    *,
    model: Path | None = None,
    inner_class: str | None = None,
    causal_class: str | None = None,
    config_class: str | None = None,
) -> PortInspection:
    """Find the classes, the HuggingFace counterpart, the kind and the tiny config of a port, by reading it.

    `model`: a HuggingFace folder or a config.json; without it the tiny config is of the counterpart's default config.

    Raises:
        EquiportError: the file or the model's config cannot be read, or a class that was named is not there.
        OpenQuestionError: several classes or several models of transformers fit; the flag that settles it is named.
    """
    text = read_port_text(port)
    classes, no_classes = _classes(port, inner_class, causal_class, config_class)
    config = model_config(model) if model is not None else None
    found = _counterpart(text, classes, config)
    notes = [*found.notes]
    model_type = found.model_type
    tasks = hf_names.tasks_of(model_type) if model_type else None
    if config is None and model_type is not None:
        config = _default(model_type, notes)
    roles = set(class_roles(text.source).values())
    gives_logits = classes is not None or bool(roles & {Role.CAUSAL, Role.INNER})
    kind = kind_of(text, config, tasks, causal=gives_logits)
    hf_class = tasks.causal if tasks else None
    validated, not_validated = SCOPE[kind]
    obstacle = no_classes
    inner = None
    if classes is not None and model_type is not None and hf_class is None:
        inner = hf_names.text_type(model_type) if model is None else _nested_type(config)
        if inner is not None:
            notes.append(f"the counterpart {model_type} has several parts; its text decoder is {inner}")
            config = _default(inner, notes) if model is None else (config or {}).get("text_config")
            model_type, hf_class = inner, hf_names.tasks_of(inner).causal
            validated = (TEXT_DECODER,)
    if obstacle is None:
        obstacle = _obstacle(text, kind, model_type, hf_class, classes)
    tiny = None
    if classes is not None and hf_class is not None and config is not None:
        tiny, said, fault = _tiny(config, model_type or "", hf_class)
        notes += said
        obstacle = obstacle or fault
    if model_type is not None and found.evidence:
        notes.insert(0, f"{found.model_type} by {found.evidence}")
    return PortInspection(
        port, kind, classes, model_type, hf_class, tiny, tuple(notes), validated, not_validated, obstacle
    )


def model_config(model: Path) -> dict[str, Any]:
    """config.json of a HuggingFace folder, or the file itself.

    Raises:
        EquiportError: not there, no JSON object, or without a model_type.
    """
    if model.is_file():
        try:
            config = json.loads(model.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as fault:
            raise EquiportError(f"is no JSON: {fault}", where=model, remedy="Give a model's config.json.") from None
        if not isinstance(config, dict):
            raise EquiportError("must be a JSON object", where=model, remedy="Give a model's config.json.")
    else:
        config = read_config(model)
    if not isinstance(config.get("model_type"), str):
        raise EquiportError("missing", where=model, field="model_type", remedy="Complete the model's config.json.")
    return config


def _classes(
    port: Path, inner: str | None, causal: str | None, config: str | None
) -> tuple[PortClasses | None, str | None]:
    """The classes, or why there are none. Names that were given are an error when they are not there."""
    try:
        return find_port_classes(port, inner_class=inner, causal_class=causal, config_class=config), None
    except OpenQuestionError:
        raise
    except EquiportError as fault:
        if inner or causal or config:
            raise
        return None, f"{fault.what}: no classes that the stages could run"


def _counterpart(text: PortText, classes: PortClasses | None, config: dict[str, Any] | None) -> Counterpart:
    if config is not None:
        return Counterpart(str(config["model_type"]), "the model that was given")
    return find_counterpart(text, classes)


def _default(model_type: str, notes: list[str]) -> dict[str, Any] | None:
    try:
        config = hf_names.default_config(model_type)
    except EquiportError as fault:
        notes.append(fault.line())
        return None
    note = f"sizes and switches are those of transformers' default {model_type} config, not of a published model"
    if note not in notes:
        notes.append(note)
    return config


def _nested_type(config: dict[str, Any] | None) -> str | None:
    nested = (config or {}).get("text_config")
    inner = nested.get("model_type") if isinstance(nested, dict) else None
    return inner if isinstance(inner, str) and hf_names.tasks_of(inner).causal else None


def _tiny(
    config: dict[str, Any], model_type: str, hf_class: str
) -> tuple[dict[str, Any] | None, list[str], str | None]:
    try:
        shrunk = tiny_config({**config, "model_type": model_type}, aliases=attribute_names(model_type))
    except EquiportError as fault:
        return None, [], f"no tiny config: {fault.line()}"
    notes = list(shrunk.notes)
    layers = attribute_names(model_type).get("num_hidden_layers", "num_hidden_layers")
    if config.get(layers) != shrunk.config.get(layers):
        notes.append(
            f"{shrunk.config.get(layers)} layers of {config.get(layers)}: a folder with weights runs them all, too"
        )
    return {**shrunk.config, "architectures": [hf_class]}, notes, None


def _obstacle(
    text: PortText, kind: PortKind, model_type: str | None, hf_class: str | None, classes: PortClasses | None
) -> str | None:
    missing = [name for name in needed_modules(text.source) if not _is_here(name, text.source.path)]
    if missing:
        return f"it imports {', '.join(missing)}, which is not installed here and no file of the port"
    if not kind.runs and hf_class is None:
        return f"the stages compare next-token logits of causal LMs; this is {kind.value}"
    if model_type is None:
        return "no model of transformers to compare it with is known: give one with --model"
    if hf_class is None:
        return f"transformers {hf_names.transformers_version()} has no causal LM for {model_type}: no source to compare"
    if classes is None:
        return "it has no class that gives next-token logits"
    return None


def _is_here(module: str, port: Path) -> bool:
    dots = len(module) - len(module.lstrip("."))
    root = module.partition(".")[0]
    if not dots and root in _STACK_ROOTS:
        return True
    folder = port.absolute().parent
    for _ in range(dots - 1):
        folder = folder.parent
    for place in [folder] if dots else [folder, *folder.parents[:2]]:
        target = place.joinpath(*module.strip(".").split("."))
        if target.with_suffix(".py").is_file() or target.is_dir():
            return True
    if dots or root in (folder.name, folder.parent.name):
        return False
    try:
        return importlib.util.find_spec(root) is not None
    except (ImportError, ValueError):
        return False
