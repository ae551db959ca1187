"""`equiport report`: write the report, or verify that it still holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug

HELP = """Write EQUIVALENCE_REPORT.md and .html from an experiment's results, or verify them.

Example: equiport report runs/demo/exp --verify
"""


def report(
    exp_dir: Annotated[Path, typer.Argument(help="Experiment directory.")],
    verify: Annotated[bool, typer.Option("--verify", help="Re-hash the inputs: does the report still hold?")] = False,
    debug: Debug = False,
) -> None:
    """Exit 0 when the report says PASS (or still holds), else 1, 3 or 4."""

    def action() -> int:
        from equiport.experiment import Experiment
        from equiport.report import verify_report, write_report

        experiment = Experiment.open(exp_dir)
        if verify:
            return verify_report(experiment).show()
        written = write_report(experiment)
        print(f"{written.headline}\n{written.path}")
        return written.exit_code

    run_command(action, debug=debug)
