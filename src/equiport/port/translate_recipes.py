"""RecipeTranslator: a unit's block file and test, from the recipes of its blocks. No key, no network, no model."""

from __future__ import annotations

import pprint
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.port.fingerprint import Fingerprint, NormFacets
from equiport.port.made_unit import MadeUnit
from equiport.port.plan_schema import PortPlan, PortUnit
from equiport.port.scaffold import Composer
from equiport.port.translate import UnitFiles, UnitRequest
from equiport.port.unit_card import WeightRule

_SECTIONS: dict[str, tuple[str, ...]] = {
    "attention": ("rope", "attention"),
    "mlp": ("mlp",),
    "embedding_norm": ("norm", "embedding", "head"),
    "position": ("rope",),
    "layer": ("norm", "rope", "attention", "mlp", "layer"),
}


@dataclass(frozen=True)
class NormTest:
    """A norm class of the source and what stands for it in the port; `device`: the stack has a fused one."""

    cls: str
    made: str
    width: int
    eps: float | None
    device: bool


def blocks_of(plan: PortPlan) -> tuple[str, ...]:
    """The ids of the plan's blocks, each once, in the plan's order."""
    return tuple(dict.fromkeys(item.block for item in plan.substitutions))


class RecipeTranslator:
    """Translates units whose blocks all have recipes."""

    name = "recipes"

    def __init__(self) -> None:
        self._composers: dict[tuple[int, tuple[str, ...]], Composer] = {}

    def can(self, plan: PortPlan, unit: PortUnit) -> tuple[str, ...]:
        """Blocks of the unit without a recipe, and what the recipes of the others do not serve."""
        missing = tuple(f"no recipe for block {block}" for block in unit.missing_recipes)
        if unit.kind not in _SECTIONS:
            return missing or (f"no recipes for units of kind {unit.kind}",)
        if missing:
            return missing
        said = self._composer(plan).unserved()
        return tuple(f"{block}: {reason}" for block in unit.blocks for reason in said.get(block, ()))

    def translate(self, request: UnitRequest) -> UnitFiles:
        """Render the unit's sections and its test.

        Raises:
            EquiportError: a block has no recipe, or a recipe does not fit.
        """
        lacks = self.can(request.plan, request.unit)
        if lacks:
            raise EquiportError("; ".join(lacks), where=request.unit.id, remedy="Translate it by an agent or by hand.")
        composer = self._composer(request.plan, request.made)
        sections = self._sections(composer, request.unit)
        composed = composer.unit_source(f"{composer.context['stem']}: {request.unit.title}.", sections)
        return UnitFiles(composed, self._test(composer, request, sections))

    def example(self, request: UnitRequest) -> str:
        """A unit's test as recipes would write it, for whoever translates the unit; empty where they cannot say."""
        composer = Composer(request.plan.fingerprint, blocks_of(request.plan), request.plan.stack)
        try:
            return self._test(composer, request, ("norm", "rope", "attention", "mlp", "layer"))
        except EquiportError:
            return ""

    def _composer(self, plan: PortPlan, made: tuple[MadeUnit, ...] = ()) -> Composer:
        key = (id(plan), tuple(item.unit.id for item in made))
        if key not in self._composers:
            self._composers[key] = Composer(plan.fingerprint, blocks_of(plan), plan.stack, made)
        return self._composers[key]

    @staticmethod
    def _sections(composer: Composer, unit: PortUnit) -> tuple[str, ...]:
        sections = _SECTIONS[unit.kind]
        attention = composer.fingerprint.attention
        if unit.kind == "attention" and attention is not None and attention.qk_norm is not None:
            sections = ("norm", *sections)
        return tuple(name for name in sections if composer.section(name))

    def _test(self, composer: Composer, request: UnitRequest, sections: tuple[str, ...]) -> str:
        f = composer.fingerprint
        norm = _norm_test(f) if request.unit.kind == "embedding_norm" and "norm" in sections else None
        path = content_dir("templates") / "scaffold" / composer.stack / "test_block.py.j2"
        text = composer.slots.render(
            path.read_text(encoding="utf-8"),
            str(path),
            unit=request.unit.id,
            sections=sections,
            config=pprint.pformat(request.config, width=110, sort_dicts=False).replace("\n", "\n    "),
            config_class=composer.names.config,
            attention_class=composer.names.attention,
            mlp_class=composer.names.mlp,
            reference_imports=_reference_imports(f, request.unit.kind, norm),
            layers=kinds_of(request.config),
            rotary=rotary_paths(f, request.config),
            norm_test=norm,
            kind=request.unit.kind,
            attention_weights=_attention_weights(f, request.config),
            mlp_weights=_mlp_weights(f),
            layer_weights=layer_weights(f, request.config, {item.unit.kind for item in request.made}),
            carded=carded(composer) if request.unit.kind == "layer" else [],
            attention_made="attention" in composer.made,
            layer_class=composer.names.layer,
            source_layer=_class_of(f, "layer"),
        )
        return text.rstrip("\n") + "\n"


def _norm_test(f: Fingerprint) -> NormTest | None:
    """The source's RMSNorm class, if it has one: PyTorch's LayerNorm stands for itself."""
    found: NormFacets | None = next((norm for norm in f.norms if norm.kind == "rmsnorm"), None)
    if found is None:
        return None
    stem = Composer(f, ()).context["stem"]
    made = f"{stem}RMSNorm" if found.weight_offset else "make_rmsnorm"
    return NormTest(found.cls, made, 40, found.eps, device=not found.weight_offset)


def _class_of(f: Fingerprint, role: str) -> str:
    return next((block.cls for block in f.blocks if block.role == role), "")


def _reference_imports(f: Fingerprint, kind: str, norm: NormTest | None) -> list[tuple[str, list[str]]]:
    """The source's classes that a unit's test names, by module."""
    classes = [norm.cls] if norm else []
    if kind in ("attention", "position", "layer") and len(f.ropes) == 1:
        classes += [rope.cls for rope in f.ropes]
    if kind == "attention" and f.attention:
        classes.append(f.attention.cls)
    if kind == "mlp" and f.mlp:
        classes.append(f.mlp.cls)
    if kind == "layer":
        classes.append(_class_of(f, "layer"))
    by_module: dict[str, set[str]] = defaultdict(set)
    for cls in classes:
        file = next((block.file for block in f.blocks if block.cls == cls), f.source_file)
        by_module[".".join(PurePosixPath(file).with_suffix("").parts)].add(cls)
    return [(module, sorted(names)) for module, names in sorted(by_module.items())]


def kinds_of(config: dict[str, Any]) -> list[int]:
    """One layer of each kind of the tiny config."""
    lists = [config.get(name) for name in ("layer_types", "no_rope_layers")]
    told = [values for values in lists if isinstance(values, list)]
    kinds = list(zip(*told, strict=True)) if told else [()]
    return sorted({kinds.index(kind) for kind in kinds})


def rotary_paths(f: Fingerprint, config: dict[str, Any]) -> dict[int, str]:
    """Layer of the tiny config -> the source's module that makes its rotary tables."""
    paths = {rope.name: rope.path for rope in f.ropes}
    kinds = {layer.layer_type: paths[layer.rope] for layer in f.layers if layer.rope in paths}
    types = config.get("layer_types") or []
    return {layer: kinds[types[layer]] for layer in kinds_of(config) if layer < len(types) and types[layer] in kinds}


def _attention_weights(f: Fingerprint, config: dict[str, Any]) -> list[tuple[str, str]]:
    """(port's parameter, source's parameter) inside the attention, as far as it is renaming."""
    a = f.attention
    if a is None:
        return []
    pairs: list[tuple[str, str]] = []
    if a.qkv_layout == "concat":
        pairs += _with_bias("qkv_proj.Wqkv", a.q_name, a.q_bias)
    elif a.qkv_layout == "separate":
        for own, name, bias in (
            ("q_proj", a.q_name, a.q_bias),
            ("k_proj", a.k_name, a.k_bias),
            ("v_proj", a.v_name, a.v_bias),
        ):
            pairs += _with_bias(f"qkv_proj.{own}", name, bias)
    pairs += _with_bias("o_proj.o_proj", a.o_name, a.o_bias)
    norm = a.qk_norm
    if norm is not None and norm.width == "per_head_weights":
        heads = config["num_attention_heads"]
        counts = (heads, config.get("num_key_value_heads") or heads)
        for own, name, count in zip(("q_layernorm", "k_layernorm"), (norm.q_name, norm.k_name), counts, strict=True):
            pairs += [(f"{own}.norms.{head}.weight", f"{name}.norms.{head}.weight") for head in range(count)]
    elif norm is not None:
        own_names = ("q_norm", "k_norm") if norm.width == "full" else ("q_layernorm", "k_layernorm")
        for own, name in zip(own_names, (norm.q_name, norm.k_name), strict=True):
            pairs += _with_bias(own, name, norm.norm.has_bias)
    return pairs


def _mlp_weights(f: Fingerprint) -> list[tuple[str, str]]:
    m = f.mlp
    if m is None:
        return []
    if m.kind == "ungated":
        names = [("up_proj", m.up_name, m.up_bias)]
    elif m.layout == "gate_first":
        names = [("gate_up_proj", m.up_name, m.up_bias)]
    else:
        names = [("gate_proj", m.gate_name, m.up_bias), ("up_proj", m.up_name, m.up_bias)]
    names.append(("down_proj", m.down_name, m.down_bias))
    return [pair for own, name, bias in names for pair in _with_bias(own, name, bias)]


def carded(composer: Composer) -> list[tuple[str, str, str]]:
    """(module of the port's layer, module of the source's, weight rules as Python) of the made units in a layer."""
    found = []
    for item in composer.made.values():
        places = composer.weight_places(item)
        if places is not None and item.card.weights and places[1]:
            found.append((places[1].rstrip("."), places[0].rstrip("."), rules_text(item.card.weights)))
    return found


def rules_text(rules: Iterable[WeightRule]) -> str:
    """Rules as a Python list, one a line."""
    lines = [f"    WeightRule(**{rule.model_dump(exclude_defaults=True)!r}),\n" for rule in rules]
    return f"[\n{''.join(lines)}]" if lines else "[]"


def layer_weights(
    f: Fingerprint, config: dict[str, Any], made: Container[str] = (), *, inner: bool = False
) -> list[tuple[str, str]]:
    """(port's parameter, source's parameter) of a whole layer, as far as recipes made it; `made`: kinds of made units;
    `inner`: of the attention and the feed-forward block in it alone."""
    a, m = f.attention, f.mlp
    pairs: list[tuple[str, str]] = []
    if a is not None and "attention" not in made:
        pairs += [(f"self_attn.{own}", f"{a.name}.{name}") for own, name in _attention_weights(f, config)]
    if m is not None and "mlp" not in made:
        pairs += [(f"mlp.{own}", f"{m.name}.{name}") for own, name in _mlp_weights(f)]
    norms = f.layer_norms
    if inner:
        return pairs
    for name in dict.fromkeys((norms.attn_in, norms.attn_out, norms.mlp_in, norms.mlp_out)):
        facets = f.norm_at(name) if name else None
        if facets is not None and facets.has_weight:
            pairs += _with_bias(name, name, facets.has_bias)
    return pairs


def _with_bias(own: str, name: str, bias: bool) -> list[tuple[str, str]]:
    return [(f"{own}.{kind}", f"{name}.{kind}") for kind in (("weight", "bias") if bias else ("weight",))]
