"""Phase 2: each unit goes to the first translator that can make it. Agents work side by side; recipes follow, since a
layer of recipes may contain blocks of agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiport import __version__
from equiport.errors import EquiportError, OpenQuestionError
from equiport.port.made_unit import MadeUnit
from equiport.port.plan_schema import PLAN_NAME, PortPlan, PortUnit, Unsupported
from equiport.port.port_run_frame import PortFailed, PortRun, folder_key
from equiport.port.port_run_units import run_unit_test, write_unit
from equiport.port.state import key_of
from equiport.port.translate import BLOCK_FILE, TEST_FILE, Translator, UnitRequest
from equiport.port.translate_agent import AgentTranslator
from equiport.port.translate_recipes import blocks_of
from equiport.port.unit_card import CARD_FILE, read_card
from equiport.port.unit_place import PLACE_TEST

Chosen = tuple[PortUnit, Translator]
# facets that an answer may leave to hand-work -> the unit that an agent can make instead
_UNIT_OF_FACET = {
    "attention": "attention", "qk_norm": "attention", "rope": "position", "ropes": "position", "mlp": "mlp",
    "moe": "moe", "norm": "embedding_norm", "norms": "embedding_norm", "layer": "layer", "residual": "layer",
}  # fmt: skip
_BY_HAND = "answered: to be translated by hand"


@dataclass(frozen=True)
class Units:
    """The units of a port: sources by id, in the plan's order, and those that no recipe made."""

    sources: dict[str, str]
    made: tuple[MadeUnit, ...] = ()


def assigned(made: PortPlan, translators: Sequence[Translator]) -> list[Chosen]:
    """Each unit with the first translator that can make it.

    Raises:
        OpenQuestionError: a block that none can make, or a part that is not translated (each is named).
    """
    chosen: list[Chosen] = []
    lacking: list[str] = []
    for unit in made.units:
        reasons: list[str] = []
        for translator in translators:
            found = translator.can(made, unit)
            if not isinstance(translator, AgentTranslator):
                # what an answer takes away from recipes: the facet is not what the fingerprint says
                found += tuple(f"{what} ({_BY_HAND})" for what in _left_by_hand(made, unit))
            if not found:
                chosen.append((unit, translator))
                break
            reasons += found
        else:
            lacking += reasons
    agents = {unit.id for unit, translator in chosen if isinstance(translator, AgentTranslator)}
    lacking = [f"{item.what} ({item.why})" for item in made.unsupported if not _taken_up(made, item, agents)] + lacking
    blocks = {block for unit in made.units if unit.id in agents for block in unit.blocks}
    lacking += [f"no recipe for block {block}" for block in made.missing_recipes if block not in blocks]
    lacking = list(dict.fromkeys(lacking))
    if lacking:
        raise OpenQuestionError(
            "; ".join(lacking),
            where=made.fingerprint.model_type,
            field="block",
            remedy="Write a recipe for it (CONTRIBUTING.md says how), or translate the unit by an agent "
            "(--engine auto) or by hand.",
        )
    return chosen


def _left_by_hand(made: PortPlan, unit: PortUnit) -> list[str]:
    return [item.what for item in made.unsupported if item.why == _BY_HAND and _facet_unit(item) == unit.id]


def _facet_unit(item: Unsupported) -> str:
    words = item.what.split(".")
    return next((_UNIT_OF_FACET[word] for word in words if word in _UNIT_OF_FACET), "")


def _taken_up(made: PortPlan, item: Unsupported, agents: set[str]) -> bool:
    """Whether an agent's unit covers what recipes do not."""
    if item.why == _BY_HAND:
        return _facet_unit(item) in agents
    blocks = {block for unit in made.units if unit.id in agents for block in unit.blocks}
    return item.what.partition(" at ")[0] in blocks and item.why.startswith("the stack has no primitive")


def translated(run: PortRun, made: PortPlan, chosen: Sequence[Chosen], config: dict[str, Any]) -> Units:
    """All units, each tested; what is done is not done again.

    Raises:
        EquiportError: a unit that cannot be made, or whose test fails.
    """
    by_agent = [(unit, translator) for unit, translator in chosen if isinstance(translator, AgentTranslator)]
    inner = [item for item in by_agent if item[0].kind != "layer"]
    units = _by_agents(run, made, inner, config, ())
    units += _by_agents(run, made, [item for item in by_agent if item[0].kind == "layer"], config, tuple(units))
    sources = {item.unit.id: item.source for item in units}
    for unit, translator in chosen:
        if unit.id not in sources:
            sources[unit.id] = _by_recipes(run, made, unit, translator, config, tuple(units))
    order = {unit.id: sources[unit.id] for unit in made.units}
    return Units(order, tuple(sorted(units, key=lambda item: list(order).index(item.unit.id))))


def _by_agents(
    run: PortRun,
    made: PortPlan,
    chosen: Sequence[tuple[PortUnit, AgentTranslator]],
    config: dict[str, Any],
    inner: tuple[MadeUnit, ...],
) -> list[MadeUnit]:
    folder = run.options.out / "units"
    keys = {
        unit.id: key_of(translator.name, unit, made.stack, made.fingerprint.model_type, blocks_of(made), config,
                        [item.source for item in inner])
        for unit, translator in chosen
    }  # fmt: skip
    found: list[MadeUnit] = []
    requests = []
    for unit, _ in chosen:
        if run.state.is_done(f"unit {unit.id}", keys[unit.id]):
            run.say(f"unit {unit.id}: up to date")
            source = (folder / unit.id / BLOCK_FILE).read_text(encoding="utf-8")
            found.append(MadeUnit(unit, source, read_card(folder / unit.id, unit.id)))
        else:
            requests.append(UnitRequest(made, unit, run.options.model, folder / unit.id, config, inner))
    if not requests:
        return found

    def ended(request: UnitRequest, result: MadeUnit | EquiportError, seconds: float) -> None:
        name, key = f"unit {request.unit.id}", keys[request.unit.id]
        if isinstance(result, EquiportError):
            run.state.failed(name, key, seconds, result.line())
            return
        files = [request.folder / file for file in (BLOCK_FILE, TEST_FILE, CARD_FILE, PLACE_TEST)]
        run.state.done(name, key, files, seconds, "by agent, both tests passed")
        run.say(f"{name}: by agent, both tests passed ({seconds:.1f} s)")

    results = chosen[0][1].translate_all(requests, ended)
    errors = [item for item in results if isinstance(item, EquiportError)]
    if errors:
        for error in errors[1:]:
            run.say(error.line())
        raise errors[0]
    return found + [item for item in results if isinstance(item, MadeUnit)]


def _by_recipes(
    run: PortRun,
    made: PortPlan,
    unit: PortUnit,
    translator: Translator,
    config: dict[str, Any],
    others: tuple[MadeUnit, ...],
) -> str:
    units = run.options.out / "units"
    folder = units / unit.id
    key = key_of(
        __version__, translator.name, unit, made.fingerprint.model_type, blocks_of(made), config,
        folder_key("recipes", made.stack), folder_key("scaffold", made.stack), run.options.out / PLAN_NAME,
        [(item.source, item.card) for item in others],
    )  # fmt: skip

    def make() -> tuple[Iterable[Path], str]:
        files = translator.translate(UnitRequest(made, unit, run.options.model, folder, config, others))
        written = write_unit(units, unit.id, files)
        test = run_unit_test(units, unit.id)
        if not test.passed:
            raise PortFailed(f"the test of unit {unit.id} fails: {test.line}", where=test.log)
        return written, f"by {translator.name}, test {test.line}"

    run.step(f"unit {unit.id}", key, make)
    return (folder / BLOCK_FILE).read_text(encoding="utf-8")
