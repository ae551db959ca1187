"""Finds the HuggingFace model that a port belongs to. Several that fit are a question, never a choice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from equiport.errors import OpenQuestionError
from equiport.intake import hf_names
from equiport.intake.port_text import PortText
from equiport.stacks.port_classes import PortClasses

_REMEDY = "Say which with --model (a HuggingFace folder or its config.json)."


@dataclass(frozen=True)
class Counterpart:
    """`model_type` of transformers, None when nothing names one; `evidence` says where it was read."""

    model_type: str | None
    evidence: str
    notes: tuple[str, ...] = ()


def find_counterpart(text: PortText, classes: PortClasses | None) -> Counterpart:
    """The model type, by the strongest evidence that names one.

    In this order: the causal class that the port imports from transformers; the names of the port's classes together
    with what file and README state outright (`model_type="x"`, a HuggingFace class); the file's name; the README's
    line on the architecture.

    Raises:
        OpenQuestionError: evidence of one strength names several types, and no README settles it.
    """
    imported = _types_of_classes(name for name in text.from_transformers if _is_whole_model(name))
    if len(imported) == 1:
        return Counterpart(next(iter(imported)), "the class that the port imports from transformers")
    named = _types_of_names(text, classes)
    stated = frozenset(name for name in text.stated_types if name in hf_names.known_types())
    mentioned = _types_of_classes(text.hf_classes())
    if named:
        settled = _settled(named | stated, text)
        if settled is None:
            raise _question(text.source.path, named | stated)
        return Counterpart(settled, "the names of the port's classes")
    for types, evidence in (
        (imported, "the classes that the port imports from transformers"),
        (stated, "the model_type that the port states"),
        (_types_of_classes(text.hf_classes(readme_only=True)), "the class that the README names"),
        (mentioned, "the class that the port's text names"),
        (_types_of_file(text.source.path), "the name of the file"),
        (_types_of_line(text), "the README's line on the architecture"),
    ):
        if types:
            settled = _settled(types, text)
            if settled is None:
                raise _question(text.source.path, types)
            return Counterpart(settled, evidence)
    strange = text.stated_types
    if len(strange) == 1:
        return Counterpart(next(iter(strange)), "the model_type that the port states", _unknown(text))
    return Counterpart(None, "", _unknown(text))


def _is_whole_model(name: str) -> bool:
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForAudioFrameClassification"))


def _types_of_classes(names: Iterable[str]) -> frozenset[str]:
    known = hf_names.types_by_class()
    return frozenset(known[name] for name in names if name in known and not name.startswith("Auto"))


def _types_of_names(text: PortText, classes: PortClasses | None) -> frozenset[str]:
    """Types by the names of the port's classes: an exact class of HuggingFace first, then the architecture's name."""
    if classes is None:
        return frozenset()
    bare = classes.causal.removeprefix("Neuron")
    exact = hf_names.types_by_class().get(bare)
    if exact is not None and hf_names.tasks_of(exact).causal:
        return frozenset({exact})
    found: set[str] = set()
    for name in (classes.causal, classes.inner, classes.config):
        found |= hf_names.types_by_stem().get(hf_names.stem(name), frozenset())
    return frozenset(found)


def _types_of_file(path: Path) -> frozenset[str]:
    return hf_names.types_by_stem().get(hf_names.normal(path.stem.removeprefix("modeling_")), frozenset())


def _types_of_line(text: PortText) -> frozenset[str]:
    words = [hf_names.normal(word) for word in text.lines.get("architecture", "").replace("/", " ").split()]
    found: set[str] = set()
    for word in words:
        found |= hf_names.types_by_stem().get(word, frozenset()) if len(word) > 3 else frozenset()
    # "similar to LLaMA" is no statement: the first architecture of the line is the port's
    first = next((word for word in words if hf_names.types_by_stem().get(word) and len(word) > 3), "")
    return hf_names.types_by_stem().get(first, frozenset()) if first else frozenset(found)


def _settled(types: frozenset[str], text: PortText) -> str | None:
    """The only type, or the only one of them whose class the README names; None leaves it open."""
    types = _families(types)
    if len(types) == 1:
        return next(iter(types))
    readme = _types_of_classes(text.hf_classes(readme_only=True)) & types
    return next(iter(readme)) if len(readme) == 1 and not text.readme_types - readme else None


def _families(types: frozenset[str]) -> frozenset[str]:
    """`x` and `x_text` are one model: the text part where it is a causal LM of its own, else the whole."""
    found: set[str] = set()
    for name in types:
        whole, text = name.removesuffix("_text"), f"{name.removesuffix('_text')}_text"
        pair = whole in types and text in types
        found.add(name if not pair else text if hf_names.tasks_of(text).causal else whole)
    return frozenset(found)


def _question(port: Path, types: Iterable[str]) -> OpenQuestionError:
    return OpenQuestionError(
        f"fits several models of transformers: {', '.join(sorted(types))}", where=port, field="--model", remedy=_REMEDY
    )


def _unknown(text: PortText) -> tuple[str, ...]:
    lost = sorted(text.hf_classes(readme_only=True) | text.hf_classes()) or sorted(text.stated_types)
    version = hf_names.transformers_version()
    if lost:
        return (f"its text names {', '.join(lost[:3])}, which transformers {version} does not have",)
    return (f"nothing in file or README names a model that transformers {version} has",)
