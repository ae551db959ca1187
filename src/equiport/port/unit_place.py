"""A made block at its place: what the toolkit writes beside it, and the toolkit's own test of it there."""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.port.fingerprint import Fingerprint
from equiport.port.made_unit import CONFIG_MODULE, PARTS_MODULE, MadeUnit, places_of, usual_names
from equiport.port.plan_schema import PortUnit
from equiport.port.plan_substitution import norm_block
from equiport.port.scaffold import Composer
from equiport.port.scaffold_source import with_imports
from equiport.port.translate import UnitRequest
from equiport.port.translate_recipes import blocks_of, carded, kinds_of, layer_weights, rotary_paths, rules_text
from equiport.port.unit_card import Role, UnitCard, place_faults
from equiport.port.unit_shapes import BlockShapes, ShapesRequest, read_shapes

PLACE_TEST = "test_place.py"
_RULED: tuple[Role, ...] = ("attention", "mlp", "layer")


@dataclass(frozen=True)
class _Site:
    """One place: how the block is called there, and the source's module that it stands for."""

    place: Role
    name: str
    arguments: str
    path: str
    inputs: str
    mapping: str


class UnitPlace:
    """One made unit at its place. What is written lies in the unit's folder; the agent may read it and not write it."""

    def __init__(self, request: UnitRequest) -> None:
        self.request, self.units = request, request.folder.parent
        self.wanted: dict[Role, tuple[str, ...]] = places_of(request.plan.fingerprint, request.unit)
        self._composer = Composer(
            request.plan.fingerprint, blocks_of(request.plan), request.plan.stack, _inner(request.made)
        )

    @property
    def config_class(self) -> str:
        """The class in port_config.py."""
        return self._composer.names.config

    def names(self) -> dict[Role, str]:
        """What the assembled model calls what takes each place."""
        usual = usual_names(self._composer.context["stem"])
        return {role: usual[role] for role in self.wanted}

    def write_beside(self) -> list[Path]:
        """port_config.py; and for a decoder layer parts.py, with the blocks that it contains."""
        composer, folder = self._composer, self.request.folder
        imports = composer.imports()
        text = with_imports("The config of this port.", imports, composer.config(unit=True))
        written = [write_text(folder / f"{CONFIG_MODULE}.py", text)]
        if self.request.unit.kind == "layer":
            sections = [name for name in ("norm", "rope", "attention", "mlp") if composer.section(name)]
            body = "\n\n\n".join(composer.section(name) for name in sections)
            own = [*imports, f"from {CONFIG_MODULE} import {self.config_class}"]
            text = with_imports("The blocks that a layer contains, as they were made and tested.", own, body)
            written.append(write_text(folder / f"{PARTS_MODULE}.py", text))
        return written

    def places_by_name(self, block: str) -> dict[Role, str]:
        """The places that the block's own names settle."""
        usual = self.names()
        return {
            role: usual[role]
            for role in self.wanted
            if not place_faults(block, {role: usual[role]}, {role: self.wanted[role]})
        }

    def shapes(self, places: Mapping[Role, str]) -> BlockShapes | None:
        """Parameters of both sides, where weights have rules; None where the skeleton's names hold.

        Raises:
            EquiportError: the block cannot be built.
        """
        ruled = [site for site in self._sites(places, {}) if site.place in _RULED]
        if not ruled:
            return None
        f = self.request.plan.fingerprint
        inner: tuple[str, ...] = ()
        if self.request.unit.kind == "layer":
            names = [part.name for part in (f.attention, f.mlp, f.moe) if part is not None]
            inner = tuple(f"{name}." for name in dict.fromkeys([*names, "self_attn", "mlp"]))
        request = ShapesRequest(
            self.request.plan.stack, self.request.config, self.config_class,
            f"nxdi_block.{ruled[0].name}({ruled[0].arguments.replace('layer', '0')})", ruled[0].path.format(layer=0),
            self._attention(), self._fused(), inner,
        )  # fmt: skip
        return read_shapes(self.units, self.request.unit.id, request)

    def write_test(self, card: UnitCard) -> Path:
        """The toolkit's own test: the block built as the assembled model builds it, weights by the card's rules."""
        request, f = self.request, self.request.plan.fingerprint
        path = content_dir("templates") / "scaffold" / request.plan.stack / "test_place.py.j2"
        paths = rotary_paths(f, request.config)
        layer = request.unit.kind == "layer"
        mapping = dict(layer_weights(f, request.config, {item.unit.kind for item in request.made}, inner=True))
        text = self._composer.slots.render(
            path.read_text(encoding="utf-8"),
            str(path),
            unit=request.unit.id,
            kind=request.unit.kind,
            config=pprint.pformat(request.config, width=110, sort_dicts=False).replace("\n", "\n    "),
            config_class=self.config_class,
            rules=rules_text(card.weights),
            carded=carded(self._composer) if layer else [],
            layers=kinds_of(request.config),
            rotary=f"{paths!r}[layer]" if len(f.ropes) > 1 else repr(f.ropes[0].path) if f.ropes else '""',
            places=[
                (site.place, site.name, site.arguments, site.path, site.inputs, site.mapping)
                for site in self._sites(card.places, mapping)
            ],
            attention_class=self._attention(),
            fused=self._fused(),
        )
        return write_text(request.folder / PLACE_TEST, text.rstrip("\n") + "\n")

    def _attention(self) -> str:
        return self._composer.names.attention if self.request.unit.kind == "layer" else ""

    def _fused(self) -> bool:
        a = self.request.plan.fingerprint.attention
        return a is not None and a.qkv_layout == "concat" and self.request.unit.kind in ("attention", "layer")

    def _sites(self, places: Mapping[Role, str], mapping: Mapping[str, str]) -> list[_Site]:
        f, sites = self.request.plan.fingerprint, []
        for place, name in places.items():
            arguments = ", ".join(self.wanted[place]).replace("layer_idx", "layer")
            path, inputs = _source(f, self.request.unit, place)
            pairs = "{}"
            if place == "embedding":
                arguments, pairs = "config, 1", '{"weight": "weight"}'
            elif place == "norm":
                norm = next(item for item in f.norms if norm_block(item) in self.request.unit.missing_recipes)
                arguments = f"config.hidden_size, eps={norm.eps}"
                kinds = [kind for kind, has in (("weight", norm.has_weight), ("bias", norm.has_bias)) if has]
                pairs = repr({kind: kind for kind in kinds})
            elif place == "layer":
                pairs = repr(dict(mapping))
            sites.append(_Site(place, name, arguments, path, inputs, pairs))
        return sites


def _inner(made: tuple[MadeUnit, ...]) -> tuple[MadeUnit, ...]:
    return tuple(item for item in made if item.unit.kind != "layer")


def _source(f: Fingerprint, unit: PortUnit, place: Role) -> tuple[str, str]:
    """The source's module for a place, with {layer} for the layer's number, and what it is fed."""
    layer = f"{f.names.layers}.{{layer}}"
    if place == "attention":
        assert f.attention is not None
        return f"{layer}.{f.attention.name}", "attention"
    if place == "mlp":
        part: Any = f.moe if unit.kind == "moe" else f.mlp
        return f"{layer}.{part.name}", "hidden"
    if place == "layer":
        return layer, "attention"
    if place == "rotary":
        return f.ropes[0].path, "tables"
    if place == "embedding":
        return f.names.embedding, "tokens"
    norm = next(item for item in f.norms if norm_block(item) in unit.missing_recipes)
    return norm.path.replace("{i}", "{layer}"), "hidden"
