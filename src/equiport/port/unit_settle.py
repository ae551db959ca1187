"""A translated block settles: its places and weight rules are established, and the toolkit's own test passes there.

Names and shapes mostly say it. Where they do not, a scaffolding agent names what goes where, and a weight-mapping agent
gives the rules; both answers are data that the toolkit checks and then tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from equiport.agents.backend import Access, Job
from equiport.agents.prompts import load_prompt
from equiport.agents.sessions import Sessions
from equiport.errors import EquiportError, ExitCode
from equiport.experiment.atomic import write_text
from equiport.port.agent_limits import AgentLimits
from equiport.port.port_run_units import run_unit_test
from equiport.port.translate import BLOCK_FILE, UnitRequest
from equiport.port.translate_prompt import fenced, relaunched, source_file
from equiport.port.unit_budget import left_for
from equiport.port.unit_card import CARD_FILE, Role, UnitCard, WeightRule, place_faults, read_card, write_card
from equiport.port.unit_place import PLACE_TEST, UnitPlace
from equiport.port.unit_shapes import BlockShapes
from equiport.port.unit_weights import rule_faults, rules_by_name


class NotSettled(EquiportError):
    """The block does not take its place; it goes back."""

    exit_code = ExitCode.FAIL


class Places(BaseModel):
    """What a scaffolding agent answers."""

    model_config = ConfigDict(extra="forbid")

    places: dict[Role, str]


class Rules(BaseModel):
    """What a weight-mapping agent answers."""

    model_config = ConfigDict(extra="forbid")

    rules: list[WeightRule]


@dataclass(frozen=True)
class Settled:
    """A block's text and its card."""

    block: str
    card: UnitCard


async def settle(
    request: UnitRequest, place: UnitPlace, sessions: Sessions, limits: AgentLimits, tests: asyncio.Semaphore
) -> Settled:
    """The block at its place, tested there.

    Raises:
        NotSettled: it does not fit its places, its weights cannot be mapped, or the toolkit's test fails (`where` is
            the log).
    """
    block = (request.folder / BLOCK_FILE).read_text(encoding="utf-8")
    given = _given_card(request)
    places = given.places if given else await _places(request, place, block, sessions, limits)
    faults = place_faults(block, places, place.wanted)
    if faults:
        raise NotSettled("; ".join(faults), where=request.unit.id, field="places")
    shapes = await asyncio.to_thread(place.shapes, places)
    settled = UnitCard(unit=request.unit.id, places=places, weights=given.weights if given else ())
    if shapes is None or settled.weights:
        faults = rule_faults(settled.weights, shapes.target, shapes.source) if shapes else []
        if faults:
            raise NotSettled("; ".join(faults[:4]), where=request.unit.id, field="weights")
        return await _tested(request, place, block, settled, tests)
    named = rules_by_name(shapes.target, shapes.source)
    if named is not None:
        return await _tested(request, place, block, settled.model_copy(update={"weights": named}), tests)
    return await _mapped(request, place, block, settled, shapes, sessions, limits, tests)


def _given_card(request: UnitRequest) -> UnitCard | None:
    """The card that the translator wrote; the toolkit's own cards are kept elsewhere until the end."""
    if not (request.folder / CARD_FILE).is_file():
        return None
    try:
        return read_card(request.folder, request.unit.id)
    except EquiportError as error:
        raise NotSettled(error.line(), field=CARD_FILE) from None


async def _places(
    request: UnitRequest, place: UnitPlace, block: str, sessions: Sessions, limits: AgentLimits
) -> dict[Role, str]:
    """By the block's own names, else by a scaffolding agent's answer."""
    found = place.places_by_name(block)
    if set(found) == set(place.wanted):
        return found
    lines = [f"- {role}: called with ({', '.join(arguments)})" for role, arguments in place.wanted.items()]
    task = "\n".join([f"Job: places of unit {request.unit.id}.", "Places:", *lines, "", fenced(block, BLOCK_FILE)])
    for number in range(1, limits.attempts + 1):
        answer = await _asked(request, "scaffolder", "places", number, task, Places, sessions, limits)
        if isinstance(answer, Places):
            faults = place_faults(block, answer.places, place.wanted)
            if not faults:
                return answer.places
            task = relaunched(task, number + 1, f"{'; '.join(faults)}.")
        else:
            task = relaunched(task, number + 1, f"{answer}.")
    raise NotSettled("nothing in the block's file takes its places", where=request.unit.id, field="places")


async def _mapped(
    request: UnitRequest, place: UnitPlace, block: str, card: UnitCard, shapes: BlockShapes, sessions: Sessions,
    limits: AgentLimits, tests: asyncio.Semaphore,
) -> Settled:  # fmt: skip
    task = "\n".join(
        [
            f"Job: weight rules of unit {request.unit.id}.",
            "Parameters of the translated block:",
            *(f"- {name} {list(shape)}" for name, shape in shapes.target.items()),
            "Tensors of the source's block:",
            *(f"- {name} {list(shape)}" for name, shape in shapes.source.items()),
            f"The block's code: {request.folder.resolve() / BLOCK_FILE}",
            *(f"The source's code: {source_file(cls)}, class {cls.cls}" for cls in request.unit.sources),
        ]
    )
    why = "no rules were given"
    for number in range(1, limits.attempts + 1):
        answer = await _asked(request, "weight-mapper", "weight rules", number, task, Rules, sessions, limits)
        if isinstance(answer, Rules):
            faults = rule_faults(answer.rules, shapes.target, shapes.source)
            if not faults:
                try:
                    ruled = card.model_copy(update={"weights": tuple(answer.rules)})
                    return await _tested(request, place, block, ruled, tests)
                except NotSettled as error:
                    faults = [f"with these rules the block does not compute what the source does: {error.what}"]
            why = "; ".join(faults[:6])
        else:
            why = str(answer)
        task = relaunched(task, number + 1, f"{why}.")
    raise NotSettled(f"its weights could not be mapped: {why}", where=request.unit.id, field="weights")


async def _asked(
    request: UnitRequest, agent: str, what: str, number: int, task: str, form: type[BaseModel], sessions: Sessions,
    limits: AgentLimits,
) -> BaseModel | str:  # fmt: skip
    """An agent's typed answer, or what was wrong with it."""
    prompt = load_prompt(agent)
    roots = tuple(dict.fromkeys(source_file(cls).parent.resolve() for cls in request.unit.sources))
    job = Job(
        name=f"{what} of unit {request.unit.id}, attempt {number}",
        prompt=task,
        system=prompt.text,
        access=Access(request.folder, prompt.tools, (), roots),
        budget_usd=left_for(request.unit.id, request.folder, sessions, limits),
        max_turns=limits.turns,
        timeout=limits.timeout,
        schema=form.model_json_schema(),
        model=limits.model,
    )
    ended = await sessions.run(job)
    if not ended.done:
        return f"there was no answer: {ended.stop.value}"
    return typed(form, ended.structured)


def typed(form: type[BaseModel], value: Any) -> BaseModel | str:
    """A structured answer as `form`, or what is wrong with it."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


async def _tested(
    request: UnitRequest, place: UnitPlace, block: str, card: UnitCard, tests: asyncio.Semaphore
) -> Settled:
    """The settled unit, if the toolkit's test of it passes."""
    async with tests:
        place.write_test(card)
        test = await asyncio.to_thread(run_unit_test, request.folder.parent, request.unit.id, 300.0, PLACE_TEST)
    if not test.passed:
        raise NotSettled(f"the toolkit's test of the block at its place fails: {test.line}", where=test.log)
    write_card(request.folder, card)
    write_text(request.folder / BLOCK_FILE, block)
    return Settled(block, card)
