"""The phases of a port, in order, each recorded when it is done: plan, units, scaffold, weights, experiment.

Python owns the phases; who translates a unit is a `Translator`. What a translator made is believed only after the
toolkit has run its test, and the port only after the pipeline has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equiport import __version__
from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.experiment.atomic import write_text
from equiport.fixtures.folder import read_config
from equiport.fixtures.tiny_config import tiny_config
from equiport.fixtures.weights import WeightKind
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.plan_render import write_plan_page
from equiport.port.plan_schema import PLAN_NAME, PortPlan, PortUnit, read_plan, write_plan
from equiport.port.plan_substitution import primitives_of
from equiport.port.port_out import check_out
from equiport.port.port_run_units import run_unit_test, write_unit
from equiport.port.questions import ANSWERS_NAME, read_answers, write_answers
from equiport.port.scaffold import Composer, write_modeling
from equiport.port.scaffold_handover import HANDOVER_NAME, handover, summary
from equiport.port.scaffold_readme import readme
from equiport.port.state import StateFile, key_of
from equiport.port.translate import BLOCK_FILE, TEST_FILE, Translator, UnitRequest
from equiport.port.translate_recipes import RecipeTranslator, blocks_of
from equiport.port.weights import check_weights
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import PortClasses, find_port_classes

ENGINES = ("recipes", "agent", "auto")
_DEVIATION = re.compile(r"# DEVIATION: (?P<text>.*(?:\n\s*# (?!DEVIATION).*)*)")


@dataclass(frozen=True)
class PortOptions:
    """What `equiport port` was given."""

    model: Path
    out: Path
    stack: str = "nxdi"
    engine: str = "recipes"
    answers: Path | None = None
    exp_dir: Path | None = None
    through: int | None = None
    quiet: bool = False
    debug: bool = False

    @property
    def experiment(self) -> Path:
        """Where the experiment goes."""
        return self.exp_dir or self.out / "exp"


@dataclass
class _Run:
    """One run: what was asked, the state, and what the phases have made so far."""

    options: PortOptions
    state: StateFile

    def say(self, text: str) -> None:
        """One line on the screen."""
        if not self.options.quiet:
            print(text, flush=True)

    def step(self, name: str, key: str, make: Callable[[], tuple[Iterable[Path], str]]) -> None:
        """Take a step unless it is done; a step that raises is recorded as failed."""
        if self.state.is_done(name, key):
            self.say(f"{name}: up to date")
            return
        clock = time.monotonic()
        try:
            outputs, detail = make()
        except EquiportError as error:
            # bad input leaves nothing behind in a folder that is not a port's yet
            if self.state.begun or error.exit_code is not ExitCode.BAD_INPUT:
                self.state.failed(name, key, time.monotonic() - clock, error.line())
            raise
        seconds = time.monotonic() - clock
        self.state.done(name, key, outputs, seconds, detail)
        self.say(f"{name}: {detail} ({seconds:.1f} s)")


def run_port(options: PortOptions) -> ExitCode:
    """Port a model. The same call goes on where an earlier one stopped.

    Raises:
        OpenQuestionError: the plan has open questions, or a block that no translator can make (it is named).
        EquiportError: bad input, or a phase that fails.
    """
    # tests run in folders of their own: relative paths would lose their meaning there
    options = replace(options, out=options.out.absolute(), model=options.model.absolute())
    model = options.model
    read_config(model)
    translators = _translators(options.engine)
    primitives_of(options.stack)
    _check_through(options.through)
    check_out(options.out)
    run = _Run(options, StateFile(options.out, model=model, stack=options.stack, engine=options.engine))
    made = _plan(run, model)
    chosen = _assigned(made, translators)
    config = tiny_config(read_config(model)).config
    sources = {unit.id: _unit(run, made, unit, translator, model, config) for unit, translator in chosen}
    port = _scaffold(run, made, sources)
    classes = find_port_classes(port)
    _weights(run, made, model, port, classes)
    _hand_over(run, made, model, port, classes)
    return _experiment(run, made, model, port, classes)


def _check_through(through: int | None) -> None:
    from equiport.pipeline import STAGES

    if through is not None and through not in STAGES:
        raise EquiportError(
            f"there is no stage {through}", field="--through", remedy=f"Give one of {', '.join(map(str, STAGES))}."
        )


def _translators(engine: str) -> tuple[Translator, ...]:
    if engine not in ENGINES:
        raise EquiportError(f"no engine {engine!r}", field="--engine", remedy=f"Give one of {', '.join(ENGINES)}.")
    if engine == "agent":
        raise EquiportError(
            "translation by agents is not part of this version", field="--engine", remedy="Use --engine recipes."
        )
    return (RecipeTranslator(),)


def _plan(run: _Run, model: Path) -> PortPlan:
    options, out = run.options, run.options.out
    recipes = _folder_key("recipes", options.stack)
    key = key_of(__version__, model / "config.json", options.stack, options.answers, recipes, _weight_files(model))

    def make() -> tuple[Iterable[Path], str]:
        found = fingerprint(model)
        given = read_answers(options.answers, found.questions) if options.answers else {}
        made = plan(found, options.stack, given)
        files = [write_plan(out, made), write_plan_page(out, made)]
        if made.open_questions:
            file = write_answers(out / ANSWERS_NAME, found.questions, given)
            first = made.open_questions[0]
            raise OpenQuestionError(
                f"{len(made.open_questions)} questions are open, the first ({first.id}): {first.question}",
                where=out / PLAN_NAME,
                remedy=f"Fill in {file}, then run again with --answers {file}.",
            )
        if made.stopped_by:
            raise OpenQuestionError(f"stopped by the answer to {', '.join(made.stopped_by)}", where=out / PLAN_NAME)
        return files, f"{found.architecture}, {len(made.units)} units, {len(blocks_of(made))} blocks"

    run.step("plan", key, make)
    return read_plan(out / PLAN_NAME)


def _weight_files(model: Path) -> list[str]:
    return sorted(path.name for path in model.glob("*.safetensors"))


def _assigned(made: PortPlan, translators: tuple[Translator, ...]) -> list[tuple[PortUnit, Translator]]:
    """Each unit with the first translator that can make it; a block that none can make stops the port."""
    lacking = [f"{item.what} ({item.why})" for item in made.unsupported]
    chosen = []
    for unit in made.units:
        reasons: tuple[str, ...] = ()
        for translator in translators:
            reasons = translator.can(made, unit)
            if not reasons:
                chosen.append((unit, translator))
                break
        else:
            lacking += reasons
    unassigned = [f"no recipe for block {block}" for block in made.missing_recipes]
    lacking = list(dict.fromkeys([*lacking, *unassigned]))
    if lacking:
        raise OpenQuestionError(
            "; ".join(lacking),
            where=f"{made.fingerprint.model_type}",
            field="block",
            remedy="Write a recipe for it (CONTRIBUTING.md says how), or translate the unit by an agent or by hand.",
        )
    return chosen


def _unit(
    run: _Run, made: PortPlan, unit: PortUnit, translator: Translator, model: Path, config: dict[str, Any]
) -> str:
    units = run.options.out / "units"
    folder = units / unit.id
    key = key_of(
        __version__, translator.name, unit, made.fingerprint.model_type, blocks_of(made), config,
        _folder_key("recipes", made.stack), _folder_key("scaffold", made.stack), run.options.out / PLAN_NAME,
    )  # fmt: skip

    def make() -> tuple[Iterable[Path], str]:
        files = translator.translate(UnitRequest(made, unit, model, folder, config))
        written = write_unit(units, unit.id, files)
        test = run_unit_test(units, unit.id)
        if not test.passed:
            raise _Failed(f"the test of unit {unit.id} fails: {test.line}", where=test.log)
        return written, f"by {translator.name}, test {test.line}"

    run.step(f"unit {unit.id}", key, make)
    return (folder / BLOCK_FILE).read_text(encoding="utf-8")


class _Failed(EquiportError):
    """The port was made and is wrong."""

    exit_code = ExitCode.FAIL


def _scaffold(run: _Run, made: PortPlan, units: dict[str, str]) -> Path:
    composer = Composer(made.fingerprint, blocks_of(made), made.stack)
    folder = run.options.out / "src"
    key = key_of(__version__, units, made, _folder_key("scaffold", made.stack), _folder_key("recipes", made.stack))

    def make() -> tuple[Iterable[Path], str]:
        path = write_modeling(composer, folder, units)
        return [path], f"{path.name}, {len(path.read_text(encoding='utf-8').splitlines())} lines"

    run.step("scaffold", key, make)
    return folder / f"{composer.names.module}.py"


def _weights(run: _Run, made: PortPlan, model: Path, port: Path, classes: PortClasses) -> None:
    key = key_of(__version__, port, model / "config.json", sorted(path.name for path in model.glob("*.safetensors")))

    def make() -> tuple[Iterable[Path], str]:
        from equiport.reference.model import materialize

        tiny = materialize(model, run.options.out / "tiny", WeightKind.PERTURBED, 42, tiny=True).folder
        adapter = load_adapter(made.stack)
        found = check_weights(adapter, port, classes, tiny, model)
        if found.findings:
            more = f" (and {len(found.findings) - 3} more)" if len(found.findings) > 3 else ""
            raise _Failed("; ".join(found.findings[:3]) + more, where=port, field="convert_hf_to_neuron_state_dict")
        return (), f"{len(found.load.loaded)} tensors of a tiny model loaded, none missing, none left over"

    run.step("weights", key, make)


def deviations(source: str) -> tuple[str, ...]:
    """The texts of the `# DEVIATION:` comments of a port."""
    return tuple(" ".join(re.sub(r"\n\s*#", "", match["text"]).split()) for match in _DEVIATION.finditer(source))


def _hand_over(run: _Run, made: PortPlan, model: Path, port: Path, classes: PortClasses) -> None:
    source, out = port.read_text(encoding="utf-8"), run.options.out
    composer = Composer(made.fingerprint, blocks_of(made), made.stack)
    pages = {
        "README.md": readme(made, port, classes, deviations(source)),
        HANDOVER_NAME: handover(made, composer, model, port, classes),
    }

    def make() -> tuple[Iterable[Path], str]:
        return [write_text(out / name, text) for name, text in pages.items()], "how it was made, how to serve it"

    run.step("handover", key_of(__version__, pages), make)
    for deviation in deviations(source):
        run.say(f"deviation: {deviation}")


def _experiment(run: _Run, made: PortPlan, model: Path, port: Path, classes: PortClasses) -> ExitCode:
    from equiport.pipeline import PortGiven, open_or_make, run_pipeline

    options = run.options
    given = PortGiven(port, model, options.experiment, classes.inner, classes.causal, classes.config, options.stack)
    experiment = open_or_make(None, given, options.through)
    code = run_pipeline(experiment, first=8, quiet=options.quiet, debug=options.debug)
    page = options.out / HANDOVER_NAME
    if code is not ExitCode.PASS:
        run.say(f"not proven: nothing of {page} is to be used before the report says PASS")
        return code
    for line in summary(made, port, classes, page):
        run.say(line)
    return code


def _folder_key(kind: str, stack: str) -> str:
    folder = content_dir("templates") / kind / stack
    return key_of([[path.relative_to(folder).as_posix(), path] for path in sorted(folder.rglob("*")) if path.is_file()])


__all__ = ["ENGINES", "TEST_FILE", "PortOptions", "deviations", "run_port"]
