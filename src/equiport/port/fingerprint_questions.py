"""Open questions: what the sources disagree on, what was not reproduced, which config key nothing accounts for."""

from __future__ import annotations

import re

from equiport.port.fingerprint import Fingerprint, OpenQuestion
from equiport.port.fingerprint_keys import contradictions
from equiport.port.fingerprint_merge import Problem
from equiport.port.source_reading_facets import norm_centres, norm_offset, read_text
from equiport.port.source_reading_model import SourceModel, numbered
from equiport.reference.stored_names import loaded_names

_BUFFERS = re.compile(r"inv_freq$|attn\.bias$|masked_bias$|attention\.bias$|\.rotary_emb\.")


def questions_of(
    source: SourceModel, found: Fingerprint, problems: list[Problem], stored: tuple[str, ...]
) -> tuple[OpenQuestion, ...]:
    """The questions of a measured fingerprint, each id once."""
    if found.route == "encoder":
        return ()  # named as a whole, nothing of it is translated
    questions = [
        *_unread(found),
        *_from_problems(found, problems),
        *_from_claims(source, found, problems),
        *_from_text(source, found),
        *_from_weights(found, tuple(loaded_names(source.skeleton, stored).values())),
    ]
    return tuple({question.id: question for question in questions}.values())


def _unread(found: Fingerprint) -> list[OpenQuestion]:
    return [
        OpenQuestion(
            id=f"config.{key.name}",
            question=f"The source reads config key {key.name!r} (value {key.value!r}), which no facet accounts for. "
            "What does it change?",
            evidence=(f"{found.source_file} reads it", f"its value here is {key.value!r} ({key.origin})"),
            choices=("no_effect", "unsupported"),
            facet="unsupported",
        )
        for key in found.config_keys
        if not key.facet and (key.origin in ("verbatim", "renamed") or key.value not in (None, False, 0, [], {}))
    ]


def _from_problems(found: Fingerprint, problems: list[Problem]) -> list[OpenQuestion]:
    merged: dict[str, list[str]] = {}
    for facet, text in problems:
        if facet == "attention" and (found.attention is None or found.attention.latent or found.attention.extras):
            continue  # named among the unsupported parts
        merged.setdefault(facet, []).append(text)
    return [
        OpenQuestion(
            id=f"measured.{facet}",
            question=f"{facet}: {texts[0]}. Is this block to be translated by hand?",
            evidence=tuple(f"measured on a small model: {text}" for text in texts),
            choices=("by_hand", "stop"),
            facet=facet,
        )
        for facet, texts in merged.items()
    ]


def _from_claims(source: SourceModel, found: Fingerprint, problems: list[Problem]) -> list[OpenQuestion]:
    read = {key.name for key in found.config_keys} | {key.stands_for for key in found.config_keys}
    questions = []
    for key, says, measured in contradictions(found, source.raw, _unsettled(found, problems)):
        how = "the source reads the key" if key in read else "the source never reads the key"
        questions.append(
            OpenQuestion(
                id=f"disagree.{key}",
                question=f"config.json says {key}: {says}; the source computes {measured}. Which one is to be ported?",
                evidence=(f"config.json: {key} = {source.raw[key]!r}", f"measured: {measured}", how),
                choices=("source", "stop"),
                facet=key,
            )
        )
    return questions


def _unsettled(found: Fingerprint, problems: list[Problem]) -> set[str]:
    words = {facet.rpartition(".")[2] for facet, _ in problems if not facet.startswith("rope")}
    if found.attention is None or "attention" in words:
        words |= {"attention", "layers.window", "ropes"}
    return words


def _from_text(source: SourceModel, found: Fingerprint) -> list[OpenQuestion]:
    questions = []
    text = read_text(source)
    styles = {rope.interleaved for rope in found.ropes}
    if text.interleaved is not None and styles and styles != {text.interleaved}:
        questions.append(
            _disagreement(
                "rope.interleaved", f"interleaved {text.interleaved}", f"interleaved {sorted(map(str, styles))}"
            )
        )
    inner = [found.attention.qk_norm.norm] if found.attention and found.attention.qk_norm else []
    for norm in (*found.norms, *inner):
        if norm.kind == "unknown":
            continue
        offset, centres = norm_offset(source, norm.cls), norm_centres(source, norm.cls)
        if offset is not None and norm.has_weight and offset != (norm.weight_offset == 1.0):
            questions.append(_disagreement(f"norm.{norm.cls}.offset", f"1 + weight {offset}", f"{norm.weight_offset}"))
        if centres is not None and centres != (norm.kind == "layernorm"):
            questions.append(_disagreement(f"norm.{norm.cls}.kind", f"subtracts the mean {centres}", norm.kind))
    return questions


def _disagreement(facet: str, text: str, measured: str) -> OpenQuestion:
    return OpenQuestion(
        id=f"disagree.{facet}",
        question=f"{facet}: the source's text says {text}, the small model computes {measured}. Which is right?",
        evidence=(f"text: {text}", f"measured: {measured}"),
        choices=("measured", "stop"),
        facet=facet,
    )


def _from_weights(found: Fingerprint, stored: tuple[str, ...]) -> list[OpenQuestion]:
    """Names of stored tensors, as they are once loaded, against the skeleton's; experts are left out, their layout
    differs between versions."""
    if not stored:
        return []
    prefix = f"{found.names.backbone}." if found.names.backbone else ""

    def bare(name: str) -> str:
        name = numbered(name.removeprefix(prefix))
        return re.sub(r"^(\w+)\.\d+\.", r"\1.{i}.", name)

    def kept(name: str) -> bool:
        return (
            not _BUFFERS.search(name)
            and "expert" not in name
            and not (found.moe is not None and f".{found.moe.name}." in name)
        )

    ours = {bare(name) for name in found.state_dict_keys if kept(name)}
    theirs = {bare(name) for name in stored if kept(name)}
    head = f"{found.names.lm_head}.weight"
    missing, extra = sorted(ours - theirs), sorted(theirs - ours)
    if found.tied_embeddings:
        missing, extra = ([name for name in names if name != head] for names in (missing, extra))
    questions = []
    for facet, names, text in (
        ("weights.missing", missing, "the source has tensors that the stored weights lack"),
        ("weights.unexpected", extra, "the stored weights hold tensors that the source has no place for"),
    ):
        if names:
            questions.append(
                OpenQuestion(
                    id=facet,
                    question=f"{text[0].upper()}{text[1:]}: {', '.join(names[:6])}. Which architecture is it?",
                    evidence=(f"{len(names)} names, layers counted once", *names[:20]),
                    choices=("source", "stop"),
                    facet=facet,
                )
            )
    return questions
