"""unit.json: what the scaffold needs of a block that no recipe made: which name takes which place, and its weights.

It is delivered beside `nxdi_block.py`, by whoever made the block or by the toolkit where names and shapes say it. It is
data: the toolkit checks it against the block's text and against its parameters, and tests the block by it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json

CARD_FILE = "unit.json"

Role = Literal["attention", "mlp", "layer", "rotary", "embedding", "norm"]
Operation = Literal["copy", "transpose", "concat", "split", "split_heads"]


class WeightRule(BaseModel):
    """How one parameter of the block is made of the source block's tensors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(min_length=1)
    op: Operation = "copy"
    sources: tuple[str, ...] = Field(min_length=1)
    dim: int = Field(0, ge=0, le=1)
    parts: int = Field(1, ge=1, le=64)
    part: int = Field(0, ge=0, le=63)
    heads: str = Field("", pattern=r"^[a-z_]*$")  # the config's name for how many groups there are

    def fault(self) -> str:
        """What is wrong with the rule by itself; empty when nothing is."""
        if self.op != "concat" and len(self.sources) != 1:
            return f"{self.target}: {self.op} takes one source"
        if self.op == "concat" and len(self.sources) < 2:
            return f"{self.target}: concat takes several sources"
        if self.op in ("split", "split_heads") and not self.part < self.parts:
            return f"{self.target}: there is no part {self.part} of {self.parts}"
        if self.op == "split_heads" and not self.heads:
            return f"{self.target}: heads must name the config's number of groups, such as num_attention_heads"
        return ""


class UnitCard(BaseModel):
    """The card of one unit. `places`: place in the assembled model -> top-level name in the block's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    unit: str
    places: dict[Role, str]
    weights: tuple[WeightRule, ...] = ()

    def faults(self) -> list[str]:
        """What is wrong with the rules by themselves."""
        found = [fault for rule in self.weights if (fault := rule.fault())]
        targets = [rule.target for rule in self.weights]
        return found + [
            f"{name}: has two rules" for name in sorted({name for name in targets if targets.count(name) > 1})
        ]


def read_card(folder: Path, unit: str) -> UnitCard:
    """The card in a unit's folder.

    Raises:
        EquiportError: missing, no JSON, of another form, of another unit, or with rules that make no sense.
    """
    path = folder / CARD_FILE
    value = read_json(path, remedy="Translate the unit again.")
    try:
        card = UnitCard.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy="Keep the card's form.") from None
    if card.unit != unit:
        raise EquiportError(f"is of unit {card.unit!r}", where=path, field="unit", remedy=f"Write {unit}.")
    faults = card.faults()
    if faults:
        raise EquiportError("; ".join(faults[:3]), where=path, field="weights", remedy="Correct the rule.")
    return card


def write_card(folder: Path, card: UnitCard) -> Path:
    """Write a unit's card."""
    return write_json(folder / CARD_FILE, card)


def place_faults(block: str, places: Mapping[Role, str], wanted: Mapping[Role, Sequence[str]]) -> list[str]:
    """What is wrong with the places: a place left out, one too many, a name that the block's text lacks, or that cannot
    be called with the arguments of its place (`wanted`: place -> argument names).

    Raises:
        SyntaxError: the block is no Python.
    """
    tree = ast.parse(block)
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    found = [f"no name is given for the place {place!r}" for place in wanted if place not in places]
    found += [f"{place!r} is no place of this unit" for place in places if place not in wanted]
    for place, name in places.items():
        if place not in wanted:
            continue
        node = defined.get(name)
        if node is None:
            found.append(f"{name} is not defined at the top of the block's file")
        elif not callable_with(node, wanted[place]):
            found.append(f"{name} cannot be called as {name}({', '.join(wanted[place])})")
    return found


def callable_with(node: ast.ClassDef | ast.FunctionDef, arguments: Sequence[str]) -> bool:
    """Whether a class or function takes these arguments: by position, those called `eps` by name. A class without an
    `__init__` of its own is taken at its base's word."""
    function: ast.FunctionDef | None = node if isinstance(node, ast.FunctionDef) else None
    if isinstance(node, ast.ClassDef):
        function = next(
            (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None
        )
        if function is None:
            return True
    assert function is not None
    given = function.args
    names = [item.arg for item in (*given.posonlyargs, *given.args)][1 if isinstance(node, ast.ClassDef) else 0 :]
    by_name = [name for name in arguments if name == "eps"]
    count = len(arguments) - len(by_name)
    required = names[: len(names) - len(given.defaults)] if given.defaults else names
    unmet = [name for name in required[count:] if name not in by_name]
    unmet += [
        item.arg
        for item, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None and item.arg not in by_name
    ]
    known = {*names[count:], *(item.arg for item in given.kwonlyargs)}
    takes_names = given.kwarg is not None or all(name in known for name in by_name)
    return not unmet and takes_names and (count <= len(names) or given.vararg is not None)
