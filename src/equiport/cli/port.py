"""`equiport port`: plan, units, scaffold, weights, all stages, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet

HELP = """Port a HuggingFace model: plan it, translate its units, assemble the port, prove it.

Examples:
  equiport port HF_DIR --stack nxdi --out PORT_DIR
  equiport port HF_DIR --out PORT_DIR --answers answers.json
The same command goes on where an interrupted one stopped; what is done is not repeated.

Checks: every unit's test in a process of its own, the weight conversion both ways, then the stages of `validate`.
Common errors: "open questions" (answer them in a file, give it with --answers), "no recipe for block" (the block is
named: it has to be translated by hand).

Exit 0 only on PASS; 1 FAIL, 2 bad input, 3 questions open or inconclusive, 4 incomplete.
"""


def port(
    model: Annotated[Path, typer.Argument(help="HuggingFace folder: config.json, with or without weights.")],
    out: Annotated[Path, typer.Option(help="Folder of the port; made, or continued.")],
    stack: Annotated[str, typer.Option(help="Serving stack.")] = "nxdi",
    engine: Annotated[str, typer.Option(help="Who translates: recipes, agent or auto.")] = "recipes",
    answers: Annotated[Path | None, typer.Option(help="Answers to the plan's open questions.")] = None,
    exp_dir: Annotated[Path | None, typer.Option("--exp-dir", help="Experiment. [default: OUT/exp]")] = None,
    through: Annotated[int | None, typer.Option(help="Last stage that counts. [7 with a tokenizer, else 6]")] = None,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Run the phases that are not done."""

    def action() -> int:
        from equiport.port.port_run import PortOptions, run_port

        return run_port(PortOptions(model, out, stack, engine, answers, exp_dir, through, quiet, debug))

    run_command(action, debug=debug)
