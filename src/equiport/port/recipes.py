"""Recipes: one folder a block, `templates/recipes/<stack>/<block>/`, with the same four files in each.

    recipe.json     block id, what it makes, the recipe it builds on, and the conditions under which it serves
    block.py.j2     what it puts into the port, in named slots: `{# slot: attention.arguments #}` starts one
    weights.py.j2   what it does to the checkpoint, in the slots weights.model and weights.layer
    broken.json     edits of the made port that take the block's point away: each must be seen to fail

A port is composed: every block of the fingerprint fills slots, and the skeletons of `templates/scaffold/<stack>/` hold
the slots together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, TemplateError

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json
from equiport.port.plan_blocks import folder_of

_SLOT = re.compile(r"^\{# slot: (?P<name>[\w.]+) #\}\n", re.MULTILINE)
_FILES = ("block.py.j2", "weights.py.j2")


@dataclass(frozen=True)
class Condition:
    """A recipe serves only where `when`, an expression over the fingerprint `f`, is true; `message`: what is not."""

    when: str
    message: str


@dataclass(frozen=True)
class BrokenEdit:
    """An edit that breaks what a block is for. `old` stands in the made port."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Recipe:
    """One block's recipe. `slots`: slot name -> template text."""

    block: str
    summary: str
    extends: str
    conditions: tuple[Condition, ...]
    slots: tuple[tuple[str, str], ...]
    broken: tuple[BrokenEdit, ...]
    folder: Path


def load_recipe(stack: str, block: str) -> Recipe | None:
    """The recipe of a block; None when the stack has none.

    Raises:
        EquiportError: a damaged recipe folder.
    """
    folder = content_dir("templates") / "recipes" / stack / folder_of(block)
    if not folder.is_dir():
        return None
    card = read_json(folder / "recipe.json")
    if not isinstance(card, dict) or card.get("block") != block:
        raise EquiportError(
            "names another block", where=folder / "recipe.json", field="block", remedy=f"Write {block}."
        )
    slots: list[tuple[str, str]] = []
    for name in _FILES:
        file = folder / name
        if file.is_file():
            slots += _split_slots(file)
    broken = folder / "broken.json"
    return Recipe(
        block=block,
        summary=str(card.get("summary", "")),
        extends=str(card.get("extends", "")),
        conditions=tuple(Condition(item["when"], item["message"]) for item in card.get("serves", [])),
        slots=tuple(slots),
        broken=tuple(BrokenEdit(**item) for item in read_json(broken)) if broken.is_file() else (),
        folder=folder,
    )


def load_recipes(stack: str, blocks: Iterable[str]) -> tuple[Recipe, ...]:
    """The recipes of `blocks` in their order, each behind the one it extends; blocks without a recipe are left out."""
    found: dict[str, Recipe] = {}

    def add(block: str) -> None:
        recipe = None if block in found else load_recipe(stack, block)
        if recipe is None:
            return
        if recipe.extends:
            add(recipe.extends)
        found[block] = recipe

    for block in blocks:
        add(block)
    return tuple(found.values())


def _split_slots(file: Path) -> list[tuple[str, str]]:
    text = file.read_text(encoding="utf-8")
    marks = list(_SLOT.finditer(text))
    if text[: marks[0].start() if marks else len(text)].strip():
        raise EquiportError("holds text before its first slot", where=file, remedy="Begin with {# slot: name #}.")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [(mark["name"], text[mark.end() : end].strip("\n")) for mark, end in zip(marks, ends, strict=True)]


def environment() -> Environment:
    """The jinja2 environment that recipes and skeletons are rendered in."""
    made = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False)
    made.filters["json"] = json.dumps
    return made


def unserved(recipe: Recipe, context: dict[str, Any]) -> tuple[str, ...]:
    """Why a recipe does not serve this fingerprint; empty when it does.

    Raises:
        EquiportError: a condition is no expression.
    """
    jinja = environment()
    said = []
    for condition in recipe.conditions:
        try:
            holds = jinja.compile_expression(condition.when, undefined_to_none=False)(**context)
        except TemplateError as error:
            raise EquiportError(
                f"{condition.when!r} is no expression: {error}", where=recipe.folder / "recipe.json", field="serves"
            ) from error
        if not holds:
            said.append(condition.message)
    return tuple(said)


class Slots:
    """What the blocks of one fingerprint put into each slot, rendered on demand."""

    def __init__(self, recipes: Iterable[Recipe], context: dict[str, Any]) -> None:
        self._recipes = tuple(recipes)
        self._jinja = environment()
        self._context = {**context, "slot": self.text, "filled": self.filled, "parts": self.parts}

    def parts(self, name: str, **extra: Any) -> list[str]:
        """Every non-empty contribution to a slot, in the recipes' order, without repetitions."""
        found = []
        for recipe in self._recipes:
            for slot, template in recipe.slots:
                if slot != name:
                    continue
                text = self.render(template, str(recipe.folder), **extra).strip("\n")
                if text.strip():
                    found.append(text)
        return list(dict.fromkeys(found))

    def text(self, name: str, indent: int = 0, blank: bool = False, **extra: Any) -> str:
        """The slot's contributions, one below the other (a blank line between them if `blank`), indented."""
        joined = ("\n\n" if blank else "\n").join(self.parts(name, **extra))
        return "\n".join(" " * indent + line if line.strip() else "" for line in joined.splitlines())

    def filled(self, name: str) -> bool:
        """Whether any recipe puts something into the slot."""
        return bool(self.parts(name))

    def render(self, template: str, where: str, **extra: Any) -> str:
        """Render a template text with this context.

        Raises:
            EquiportError: the template is faulty or asks for a name that is not there.
        """
        try:
            return self._jinja.from_string(template).render(**self._context, **extra)
        except TemplateError as error:
            raise EquiportError(f"the template fails: {error}", where=where, remedy="Correct the recipe.") from error
