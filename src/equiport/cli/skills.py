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
