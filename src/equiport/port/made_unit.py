"""Units that no recipe made, as the scaffold takes them up: their places in the assembled model, and their text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from equiport.errors import EquiportError
from equiport.port.fingerprint import Fingerprint
from equiport.port.plan_schema import PortUnit
from equiport.port.scaffold_source import Definition, definitions, imports_of
from equiport.port.unit_card import Role, UnitCard

#: Modules that the toolkit writes beside a unit; their content stands in the assembled file.
CONFIG_MODULE, PARTS_MODULE = "port_config", "parts"
_SECTION: dict[Role, str] = {
    "attention": "attention", "mlp": "mlp", "layer": "layer", "rotary": "rope", "embedding": "embedding",
    "norm": "norm",
}  # fmt: skip
#: Blocks that reach beyond their unit, into the whole model, where nothing takes them up.
_BEYOND = ("embedding.norm", "position.learned", "multipliers.embedding", "multipliers.logits", "head.")


@dataclass(frozen=True)
class MadeUnit:
    """A unit with its block's source and its card."""

    unit: PortUnit
    source: str
    card: UnitCard

    @property
    def sections(self) -> tuple[str, ...]:
        """The parts of the modeling file that it makes."""
        return tuple(_SECTION[role] for role in self.card.places)


def places_of(f: Fingerprint, unit: PortUnit) -> dict[Role, tuple[str, ...]]:
    """The places that a unit's block takes in the assembled model, with the arguments it is called with there.

    Raises:
        EquiportError: there is no place for something in it.
    """
    beyond = [block for block in unit.missing_recipes if block.startswith(_BEYOND)]
    if beyond:
        raise EquiportError(f"{beyond[0]} reaches into the whole model, which is assembled from recipes", where=unit.id)
    layered = len({layer.window for layer in f.layers}) > 1 or len({layer.rope for layer in f.layers}) > 1
    of_layer = ("config", "layer_idx") if layered else ("config",)
    if unit.kind == "attention":
        return {"attention": of_layer}
    if unit.kind in ("mlp", "moe"):
        if unit.kind == "mlp" and f.mlp is not None and not f.mlp.name:
            raise EquiportError("the source's feed-forward block is no module of its own", where=unit.id)
        return {"mlp": ("config",)}
    if unit.kind == "layer":
        return {"layer": of_layer}
    if unit.kind == "position" and len(f.ropes) == 1:
        return {"rotary": ("config",)}
    if unit.kind == "embedding_norm":
        lacking = [block for block in unit.missing_recipes if block.startswith("norm.")]
        if len(lacking) > 1:
            raise EquiportError(f"one norm class cannot take the place of {' and '.join(lacking)}", where=unit.id)
        norm: dict[Role, tuple[str, ...]] = {"norm": ("width", "eps")} if lacking else {}
        return {"embedding": ("config", "sequence_dimension"), **norm}
    raise EquiportError(f"units of kind {unit.kind} have no place in the assembled model", where=unit.id)


def usual_names(stem: str) -> dict[Role, str]:
    """What the assembled model calls what takes each place."""
    return {
        "attention": f"Neuron{stem}Attention",
        "mlp": f"Neuron{stem}MLP",
        "layer": f"Neuron{stem}DecoderLayer",
        "rotary": "make_rotary_embedding",
        "embedding": "make_token_embedding",
        "norm": f"{stem}Norm",
    }


def own_norms(units: Iterable[MadeUnit], stem: str) -> dict[str, str]:
    """Block id of a norm -> the class that takes its place."""
    return {
        block: usual_names(stem)["norm"]
        for made in units
        if "norm" in made.card.places
        for block in made.unit.missing_recipes
        if block.startswith("norm.")
    }


def texts(units: Iterable[MadeUnit], stem: str, own: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Unit -> its definitions under the names of the assembled model.

    `own`: names that the assembled file defines by itself and that are left out; `taken`: names of other parts. What a
    unit defines beside its places is renamed where another part has the name too.
    """
    usual, left_out = usual_names(stem), set(own)
    found: dict[str, str] = {}
    used = {*taken, *usual.values()}
    for made in units:
        items = [item for item in definitions(made.source) if item.name not in left_out]
        names = {name: usual[role] for role, name in made.card.places.items()}
        for item in items:
            if item.name not in names:
                names[item.name] = item.name if item.name not in used else _longer(made.unit.id, item.name)
        used |= set(names.values())
        found[made.unit.id] = "\n\n\n".join(_renamed(item, names) for item in items)
    return found


def imports(units: Mapping[str, MadeUnit]) -> list[str]:
    """The import statements of units, without those of what the toolkit wrote beside them."""
    lines = [line for made in units.values() for line in imports_of(made.source)]
    beside = re.compile(rf"(from|import) ({CONFIG_MODULE}|{PARTS_MODULE})\b")
    return [line for line in lines if not beside.match(line)]


def _longer(unit: str, name: str) -> str:
    if name[:1].isupper():
        return "".join(part.capitalize() for part in unit.split("_")) + name
    return f"{unit.upper()}_{name}" if name.isupper() else f"{unit}_{name}"


def _renamed(item: Definition, names: Mapping[str, str]) -> str:
    changed = {old: new for old, new in names.items() if old != new}
    if not changed:
        return item.text
    words = "|".join(re.escape(name) for name in sorted(changed, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({words})\b", lambda match: changed[match[1]], item.text)
