"""run_stage3.py: fault localisation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, ExpDir, Force, Output, Quiet, Seed, ThresholdsFile, experiment_subject


def command(
    stage2_output: Annotated[Path, typer.Option(help="results/stage2.json.")],
    tau_r: Annotated[float, typer.Option(help="Limit of R.", min=0)] = 1.2,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
) -> None:
    """Find where divergence begins: change points along the layers, suspects ranked, cause classes by magnitude."""

    def action() -> int:
        from equiport.experiment import Experiment
        from equiport.stacks.loading import load_adapter
        from equiport.stages import stage3
        from equiport.stages.frame import StageOptions, exit_code

        found = Experiment.open(exp_dir) if exp_dir else Experiment.find(stage2_output.parent)
        options = StageOptions(found.root if found else None, output, thresholds, force, quiet, debug, seed)
        subject = experiment_subject(options)
        adapter = load_adapter(subject.stack) if subject else None
        return exit_code(stage3.run(options, stage2_output, tau_r, subject, adapter).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage3.py."""
    typer.run(command)
