"""`equiport audit`: does a port, and do its tests, mean something?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet

HELP = """Audit a port and its tests: could they pass without being right?

Examples:
  equiport audit units/attention
  equiport audit units/attention --dynamic
  equiport audit modeling_x_nxdi.py --out audit
  equiport audit --explain reference-in-workspace

The source is parsed, never imported. Writes audit.json and AUDIT.md into PATH (or its folder), or --out.
With --dynamic the tests are also run, in processes of their own that have limits of time and memory, no network and no
right to write: the port is made wrong in several ways, and the tests must notice; its determinism, uninitialised
memory, other seeds and shapes are tried, and whether it runs the reference's code. Default is --static-only, which runs
nothing.
A suppressions file lets findings stand, each with a reason that AUDIT.md prints.

Exit 0: clean (notes are allowed); 1: errors or warnings; 2: bad input, or no Python file.
"""


def audit(
    path: Annotated[Path | None, typer.Argument(help="A Python file, or a folder that holds some.")] = None,
    explain: Annotated[str | None, typer.Option(help="Explain a rule, and end.")] = None,
    suppressions: Annotated[Path | None, typer.Option(help="Suppressions file (JSON), with reasons.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json and AUDIT.md.")] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic/--static-only", help="Also run the tests, with wrong ports among others.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1.0, help="With --dynamic: limit for each folder of tests.")] = 120.0,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Run every rule over every file."""

    def action() -> int:
        from equiport.audit import audit_path, load_suppressions
        from equiport.audit.render import PAGE_NAME, headline, page, table
        from equiport.audit.render import explain as explained
        from equiport.audit.report import AUDIT_NAME
        from equiport.errors import EquiportError, ExitCode
        from equiport.experiment.atomic import write_text

        if explain is not None:
            print(explained(explain))
            return ExitCode.PASS
        if path is None:
            raise EquiportError("PATH is missing", remedy="Give a Python file or a folder, or --explain RULE.")
        found = audit_path(path, load_suppressions(suppressions) if suppressions else ())
        folder = out or (path if path.is_dir() else path.parent)
        if dynamic:
            from equiport.audit.dynamic.launch import DynamicOptions, add_dynamic
            from equiport.audit.work import python_files

            root = path if path.is_dir() else path.parent
            found = add_dynamic(found, python_files(path), root, DynamicOptions(seconds=seconds))
        found.save(folder / AUDIT_NAME)
        write_text(folder / PAGE_NAME, page(found))
        print(headline(found) if quiet else table(found))
        return ExitCode.PASS if found.clean else ExitCode.FAIL

    run_command(action, debug=debug)
