"""The phases of a port, in order, each recorded when it is done: plan, units, scaffold, weights, experiment.

Python owns the phases; who translates a unit is a `Translator`. What a translator made is believed only after the
toolkit has run its test, and the port only after the pipeline has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from equiport import __version__
from equiport.agents.backend import Access, Backend
from equiport.agents.budget import Budget
from equiport.agents.environment import taken_from
from equiport.agents.sdk_backend import SdkBackend
from equiport.agents.sessions import Sessions
from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.experiment import Experiment
from equiport.experiment.atomic import write_text
from equiport.fixtures.folder import read_config
from equiport.fixtures.tiny_config import tiny_config
from equiport.fixtures.weights import WeightKind
from equiport.port import agent_debugger
from equiport.port.agent_planner import propose_answers
from equiport.port.agent_reviewer import review
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.plan_render import write_plan_page
from equiport.port.plan_schema import PLAN_NAME, PortPlan, SourceClass, read_plan, write_plan
from equiport.port.plan_substitution import primitives_of
from equiport.port.port_out import check_out
from equiport.port.port_run_frame import AGENTS, ENGINES, PortFailed, PortOptions, PortRun, folder_key
from equiport.port.port_run_translate import Units, assigned, translated
from equiport.port.questions import ANSWERS_NAME, read_answers, write_answers
from equiport.port.scaffold import Composer, write_modeling
from equiport.port.scaffold_handover import HANDOVER_NAME, handover, summary
from equiport.port.scaffold_readme import readme
from equiport.port.state import StateFile, key_of
from equiport.port.translate import Translator
from equiport.port.translate_agent import AgentTranslator
from equiport.port.translate_prompt import source_file
from equiport.port.translate_recipes import RecipeTranslator, blocks_of
from equiport.port.weights import check_weights
from equiport.report import write_report
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import PortClasses, find_port_classes

_DEVIATION = re.compile(r"# DEVIATION: (?P<text>.*(?:\n\s*# (?!DEVIATION).*)*)")


def run_port(options: PortOptions, backend: Backend | None = None) -> ExitCode:
    """Port a model. The same call goes on where an earlier one stopped. `backend` runs the agents' jobs; without one it
    is the SDK's, with the key from the environment.

    Raises:
        OpenQuestionError: the plan has open questions, or a block that no translator can make (it is named).
        BudgetSpent, ModelUnreachable: agents cannot go on; the same call does.
        EquiportError: bad input, or a phase that fails.
    """
    # tests run in folders of their own: relative paths would lose their meaning there
    options = replace(options, out=options.out.absolute(), model=options.model.absolute())
    model = options.model
    read_config(model)
    _check_engine(options.engine)
    primitives_of(options.stack)
    _check_through(options.through)
    check_out(options.out)
    run = PortRun(options, StateFile(options.out, model=model, stack=options.stack, engine=options.engine))
    if options.engine == "recipes":
        return _phases(run)
    with taken_from(needed=backend is None) as variables:
        folder = options.out / AGENTS
        budget = Budget(options.limits.total_usd, run.state.state.costs.usd)
        chosen = backend or SdkBackend(folder / "cli", variables)
        run.sessions = Sessions(chosen, run.state, budget, folder / "transcripts", run.say)
        try:
            return _phases(run)
        finally:
            costs = run.state.state.costs
            for task, usd in costs.usd_by_task.items():
                run.say(f"agents: {task}: {usd:.4f} USD, {costs.tokens_by_task[task]} tokens")
            run.say(f"agents: {costs.usd:.4f} USD, {costs.tokens} tokens in all")


def _phases(run: PortRun) -> ExitCode:
    model = run.options.model
    made = _plan(run, model)
    chosen = assigned(made, _translators(run))
    config = tiny_config(read_config(model)).config
    units = translated(run, made, chosen, config)
    port = _scaffold(run, made, units)
    classes = find_port_classes(port)
    _weights(run, made, model, port, classes)
    _hand_over(run, made, model, port, classes, units)
    return _experiment(run, made, model, port, classes)


def _check_through(through: int | None) -> None:
    from equiport.pipeline import STAGES

    if through is not None and through not in STAGES:
        raise EquiportError(
            f"there is no stage {through}", field="--through", remedy=f"Give one of {', '.join(map(str, STAGES))}."
        )


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise EquiportError(f"no engine {engine!r}", field="--engine", remedy=f"Give one of {', '.join(ENGINES)}.")


def _translators(run: PortRun) -> tuple[Translator, ...]:
    if run.sessions is None:
        return (RecipeTranslator(),)
    agent = AgentTranslator(run.sessions, run.options.limits)
    return (agent,) if run.options.engine == "agent" else (RecipeTranslator(), agent)


def _plan(run: PortRun, model: Path) -> PortPlan:
    options, out = run.options, run.options.out
    recipes = folder_key("recipes", options.stack)
    key = key_of(__version__, model / "config.json", options.stack, options.answers, recipes, _weight_files(model))

    def make() -> tuple[Iterable[Path], str]:
        found = fingerprint(model)
        given = read_answers(options.answers, found.questions) if options.answers else {}
        made = plan(found, options.stack, given)
        if made.open_questions and run.sessions is not None:
            given = {**_proposed(run, made), **given}
            made = plan(found, options.stack, given)
            write_answers(out / ANSWERS_NAME, found.questions, given)
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


def _proposed(run: PortRun, made: PortPlan) -> dict[str, str]:
    """A planner's answers to what is open; each is told with its reason."""
    assert run.sessions is not None
    stand = Access(run.options.out / AGENTS / "planner", readable=(run.options.model,))
    found = propose_answers(made.fingerprint, made.open_questions, run.sessions, run.options.limits, stand)
    for name, answer in found.answers.items():
        run.say(f"planner: {name}: {answer} ({found.reasons[name]})")
    return dict(found.answers)


def _weight_files(model: Path) -> list[str]:
    return sorted(path.name for path in model.glob("*.safetensors"))


def _scaffold(run: PortRun, made: PortPlan, units: Units) -> Path:
    composer = Composer(made.fingerprint, blocks_of(made), made.stack, units.made)
    folder = run.options.out / "src"
    cards = [item.card for item in units.made]
    key = key_of(
        __version__, units.sources, cards, made, folder_key("scaffold", made.stack), folder_key("recipes", made.stack)
    )

    def make() -> tuple[Iterable[Path], str]:
        path = write_modeling(composer, folder, units.sources)
        return [path], f"{path.name}, {len(path.read_text(encoding='utf-8').splitlines())} lines"

    run.step("scaffold", key, make)
    return folder / f"{composer.names.module}.py"


def _weights(run: PortRun, made: PortPlan, model: Path, port: Path, classes: PortClasses) -> None:
    key = key_of(__version__, port, model / "config.json", sorted(path.name for path in model.glob("*.safetensors")))

    def make() -> tuple[Iterable[Path], str]:
        from equiport.reference.model import materialize

        tiny = materialize(model, run.options.out / "tiny", WeightKind.PERTURBED, 42, tiny=True).folder
        adapter = load_adapter(made.stack)
        found = check_weights(adapter, port, classes, tiny, model)
        if found.findings:
            more = f" (and {len(found.findings) - 3} more)" if len(found.findings) > 3 else ""
            raise PortFailed("; ".join(found.findings[:3]) + more, where=port, field="convert_hf_to_neuron_state_dict")
        return (), f"{len(found.load.loaded)} tensors of a tiny model loaded, none missing, none left over"

    run.step("weights", key, make)


def deviations(source: str) -> tuple[str, ...]:
    """The texts of the `# DEVIATION:` comments of a port."""
    return tuple(" ".join(re.sub(r"\n\s*#", "", match["text"]).split()) for match in _DEVIATION.finditer(source))


def _hand_over(run: PortRun, made: PortPlan, model: Path, port: Path, classes: PortClasses, units: Units) -> None:
    source, out = port.read_text(encoding="utf-8"), run.options.out
    composer = Composer(made.fingerprint, blocks_of(made), made.stack, units.made)
    by_agent = [block for item in units.made for block in item.unit.blocks]
    pages = {
        "README.md": readme(made, port, classes, deviations(source), by_agent),
        HANDOVER_NAME: handover(made, composer, model, port, classes),
    }

    def make() -> tuple[Iterable[Path], str]:
        return [write_text(out / name, text) for name, text in pages.items()], "how it was made, how to serve it"

    run.step("handover", key_of(__version__, pages), make)
    for deviation in deviations(source):
        run.say(f"deviation: {deviation}")


def _experiment(run: PortRun, made: PortPlan, model: Path, port: Path, classes: PortClasses) -> ExitCode:
    from equiport.pipeline import PortGiven, open_or_make, run_pipeline

    options = run.options
    given = PortGiven(port, model, options.experiment, classes.inner, classes.causal, classes.config, options.stack)
    experiment = open_or_make(None, given, options.through)

    def stages() -> ExitCode:
        return run_pipeline(Experiment.open(experiment.root), first=8, quiet=options.quiet, debug=options.debug)

    code = stages()
    if run.sessions is not None and options.patch and code is ExitCode.FAIL and agent_debugger.wanted(experiment):
        failing = agent_debugger.Debugging(experiment, made, port, options.out / AGENTS / "debugger")
        patched = agent_debugger.debug(failing, run.sessions, options.limits, stages)
        code = code if patched is None else patched
    if run.sessions is not None and options.review:
        _review(run, made, experiment, port)
    page = options.out / HANDOVER_NAME
    if code is not ExitCode.PASS:
        run.say(f"not proven: nothing of {page} is to be used before the report says PASS")
        return code
    for line in summary(made, port, classes, page):
        run.say(line)
    return code


def _review(run: PortRun, made: PortPlan, experiment: Experiment, port: Path) -> None:
    assert run.sessions is not None
    f = made.fingerprint
    source = source_file(SourceClass(cls=f.architecture, file=f.source_file, line=1, path=""))
    folder = run.options.out / AGENTS / "reviewer"
    found = review(experiment, port, source, folder, run.sessions, run.options.limits)
    for item in found.findings if found else ():
        run.say(f"advisory, {item.severity}: {item.file}:{item.line}: {item.finding}")
    if found:
        write_report(Experiment.open(experiment.root))


__all__ = ["ENGINES", "PortOptions", "deviations", "run_port"]
