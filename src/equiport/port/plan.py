"""`plan(fingerprint, stack)`: the work that a port is, from what the source is. Nothing in it is guessed."""

from __future__ import annotations

from collections.abc import Mapping

from equiport import __version__
from equiport.port.fingerprint import Fingerprint
from equiport.port.plan_blocks import available_recipes
from equiport.port.plan_schema import ConfigAttribute, PortPlan, ReferenceModel, Substitution, Unsupported
from equiport.port.plan_substitution import placed_blocks, primitives_of
from equiport.port.plan_units import make_units
from equiport.port.questions import STOP

# what the stack's own base classes need by these names
_REQUIRED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
             "vocab_size", "max_position_embeddings")  # fmt: skip


def plan(found: Fingerprint, stack: str, answers: Mapping[str, str] | None = None) -> PortPlan:
    """The plan of a port. Questions of the fingerprint without an answer stay open in it.

    Raises:
        EquiportError: nothing is known of the stack.
    """
    primitives = primitives_of(stack)
    recipes = available_recipes(stack)
    answers = dict(answers or {})
    substitutions = tuple(
        Substitution(
            block=block.block,
            path=block.path,
            cls=block.cls,
            primitive=primitives.get(block.block, ""),
            has_recipe=block.block in recipes,
            why=block.why,
        )
        for block in placed_blocks(found)
    )
    return PortPlan(
        tool_version=__version__,
        stack=stack,
        fingerprint=found,
        routing=_routing(found),
        reference=_reference(found),
        substitutions=substitutions,
        unsupported=_unsupported(found, substitutions, answers),
        missing_recipes=tuple(sorted({item.block for item in substitutions if not item.has_recipe})),
        config_attributes=_attributes(found),
        units=make_units(found, substitutions),
        open_questions=tuple(question for question in found.questions if question.id not in answers),
        stopped_by=tuple(sorted(key for key, answer in answers.items() if answer == STOP)),
        answers=answers,
    )


def _routing(found: Fingerprint) -> str:
    texts = {
        "decoder": "Decoder-only text model: planned whole.",
        "multimodal": "Takes images or audio: only named here. Plan its text model from the config's text part.",
        "encoder_decoder": "Encoder-decoder model: only named here, nothing of it is translated.",
        "recurrent": "Every layer keeps a recurrent state: only named here, nothing of it is translated.",
        "hybrid": "Some layers keep a recurrent state: only named here, they are not translated.",
        "encoder": "Tokens see later tokens: no decoder, nothing of it is translated.",
    }
    return texts[found.route]


def _reference(found: Fingerprint) -> ReferenceModel:
    if found.route == "multimodal":
        text = next((part for part in found.unsupported if "reference:" in part), "")
        for name, module in (("MLlama", "mllama"), ("Llama4", "llama4"), ("Pixtral", "pixtral")):
            if name in text:
                return ReferenceModel(name=name, module=f"models.{module}", why=text)
        return ReferenceModel(name="", module="", why="how images enter the model was not found in its text")
    if found.route != "decoder":
        return ReferenceModel(name="", module="", why=f"no reference for a model of route {found.route}")
    if found.moe:
        return ReferenceModel(
            name="Qwen3 MoE", module="models.qwen3_moe.modeling_qwen3_moe", why="text model with experts"
        )
    return ReferenceModel(name="Llama", module="models.llama.modeling_llama", why="dense text model")


def _unsupported(
    found: Fingerprint, substitutions: tuple[Substitution, ...], answers: Mapping[str, str]
) -> tuple[Unsupported, ...]:
    why = "no part of the decoder that is ported" if found.route != "decoder" else "the fingerprint has no facet for it"
    parts = [Unsupported(what=text, why=why) for text in found.unsupported]
    parts += [
        Unsupported(what=f"{item.block} at {item.path}", why="the stack has no primitive for it")
        for item in substitutions
        if not item.primitive
    ]
    words = {"unsupported": "answered: it changes the computation", "by_hand": "answered: to be translated by hand"}
    parts += [Unsupported(what=key, why=words[answer]) for key, answer in answers.items() if answer in words]
    return tuple(dict.fromkeys(parts))


def _attributes(found: Fingerprint) -> tuple[ConfigAttribute, ...]:
    """What get_required_attributes must list, and what add_derived_config must make."""
    attributes: dict[str, ConfigAttribute] = {}
    for key in found.config_keys:
        if key.facet.startswith("none") and key.name not in _REQUIRED:
            continue
        if key.origin == "verbatim":
            told, kind = "stands in config.json", "verbatim"
        elif key.origin == "renamed":
            told, kind = f"config.json calls it {key.stands_for}", "derived"
        elif key.origin == "default":
            told, kind = "default of the config class, not in config.json", "derived"
        else:
            told, kind = "computed when the config object is made", "derived"
        attributes[key.name] = ConfigAttribute(name=key.name, value=key.value, kind=kind, source=told)  # type: ignore[arg-type]
    for name, value in _needed(found).items():
        attributes.setdefault(
            name,
            ConfigAttribute(name=name, value=value, kind="derived", source="needed by the stack, from the fingerprint"),
        )
    return tuple(attributes[name] for name in sorted(attributes))


def _needed(found: Fingerprint) -> dict[str, object]:
    a = found.attention
    values: dict[str, object] = {
        "hidden_size": found.hidden_size,
        "num_hidden_layers": found.num_layers,
        "vocab_size": found.vocab_size,
        "max_position_embeddings": found.max_positions,
    }
    if a is not None and not a.latent:
        values |= {"num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads, "head_dim": a.head_dim}
    if found.ropes:
        values["rope_theta"] = found.ropes[0].theta
    if found.mlp is not None:
        values |= {"intermediate_size": found.mlp.intermediate_size, "hidden_act": found.mlp.activation}
    final = found.final_norm
    if final is not None and final.eps is not None:
        values["rms_norm_eps" if final.kind == "rmsnorm" else "layer_norm_eps"] = final.eps
    return {name: value for name, value in values.items() if value is not None}
