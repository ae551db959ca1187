"""`equiport skills`: the pages that agent CLIs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet

HELP = "The skills, agents and references that agent CLIs load."
LINT_HELP = """Check skills, agents and references: could an agent CLI load them, could a reader follow them?

Examples:
  equiport skills lint
  equiport skills lint path/to/plugin

Checked: frontmatter and names, links and headings, files named, every `equiport ...` and `scripts/....py ...` against
the commands themselves (they are asked; no list is kept), size, code blocks that parse, pages that nothing leads to.

Exit 0: nothing to mend; 1: problems, one a line; 2: bad input.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def _skills() -> None:
    """Keeps the sub-command's name, also while there is one alone."""


@app.command("lint", help=LINT_HELP)
def lint(
    root: Annotated[Path | None, typer.Argument(help="Root of a plugin. [default: equiport's own]")] = None,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Print every problem."""

    def action() -> int:
        from equiport.cli.command_table import command_table
        from equiport.content import content_dir
        from equiport.errors import ExitCode
        from equiport.skills.lint import lint as run_lint

        found = run_lint((root or content_dir("skills").parent).absolute(), command_table(content_dir("scripts")))
        for problem in found.problems:
            print(problem)
        if not quiet or found.problems:
            print(
                f"{len(found.skills)} skills, {len(found.agents)} agents, {found.pages} pages, "
                f"{found.commands} commands; {len(found.problems)} problems"
            )
        return int(ExitCode.FAIL if found.problems else ExitCode.PASS)

    run_command(action, debug=debug)


SCENARIOS_HELP = """List the scenarios: tasks for a session that follows the skills, judged by what it leaves on disk.

prepare writes one's workspace, check says what a session did not do or must not have done, run does both around a
session of the agent CLI. Any agent CLI, or a person, can play one between prepare and check.

Example: equiport skills scenarios
"""
PREPARE_HELP = """Write a scenario's workspace, and print what to ask the session.

Example: equiport skills prepare wrong-port work
"""
CHECK_HELP = """Judge a played scenario by its workspace. Exit 0: as it should be; 1: problems; 2: bad input.

Example: equiport skills check wrong-port work
"""
RUN_HELP = """Play a scenario with a real session (claude-agent-sdk, a key, money), and judge it.

Example: equiport skills run open-question work --budget-usd 2
"""
Name = Annotated[str, typer.Argument(help="A scenario's name.")]
Workspace = Annotated[Path, typer.Argument(help="Its folder.")]


@app.command("scenarios", help=SCENARIOS_HELP)
def scenarios(debug: Debug = False) -> None:
    """Print names, skills and prompts."""

    def action() -> int:
        from equiport.skills.scenarios import SCENARIOS

        for scenario in SCENARIOS:
            print(f"{scenario.name} ({scenario.skill}): {scenario.prompt}")
        return 0

    run_command(action, debug=debug)


@app.command("prepare", help=PREPARE_HELP)
def prepare(name: Name, workspace: Workspace, debug: Debug = False) -> None:
    """Write the workspace."""

    def action() -> int:
        from equiport.skills.scenarios import scenario_named

        scenario = scenario_named(name)
        scenario.prepare(workspace)
        print(f"in {workspace}, with the skill {scenario.skill}: {scenario.prompt}")
        return 0

    run_command(action, debug=debug)


@app.command("check", help=CHECK_HELP)
def check(name: Name, workspace: Workspace, debug: Debug = False) -> None:
    """Print every problem."""
    run_command(lambda: _judged(name, workspace), debug=debug)


@app.command("run", help=RUN_HELP)
def run(
    name: Name,
    workspace: Workspace,
    budget_usd: Annotated[float, typer.Option("--budget-usd", min=0.01, help="The session ends when it is spent.")] = 5,
    debug: Debug = False,
) -> None:
    """Prepare, start a session, check."""

    def action() -> int:
        from equiport.content import content_dir
        from equiport.errors import EquiportError
        from equiport.skills.scenarios import scenario_named
        from equiport.skills.session import SessionSettings, has_key, run_session

        scenario = scenario_named(name)
        if not has_key():
            raise EquiportError("no key for a model is set", field="ANTHROPIC_API_KEY", remedy="Set it.")
        scenario.prepare(workspace)
        settings = SessionSettings(budget_usd=budget_usd, plugin=content_dir("skills").parent)
        end = run_session(scenario.prompt, workspace, settings)
        print(end.text)
        print(f"{end.cost_usd:.2f} USD; {end.error or 'the session came to its end'}")
        return _judged(name, workspace)

    run_command(action, debug=debug)


def _judged(name: str, workspace: Path) -> int:
    from equiport.errors import EquiportError, ExitCode
    from equiport.skills.scenarios import scenario_named

    scenario = scenario_named(name)
    if not workspace.is_dir():
        raise EquiportError("no such folder", where=workspace, remedy=f"equiport skills prepare {name} {workspace}")
    problems = scenario.check(workspace)
    for problem in problems:
        print(problem)
    print(f"{name}: {f'{len(problems)} problems' if problems else 'as it should be'}")
    return int(ExitCode.FAIL if problems else ExitCode.PASS)
