"""run_stage2.py: component tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, ExpDir, Force, Output, Quiet, Seed, ThresholdsFile, experiment_subject


def command(
    tests_dir: Annotated[Path, typer.Option(help="Folder of test_NN_*.py.")],
    tau_r: Annotated[float, typer.Option(help="Limit of a single draw's R.", min=0)] = 1.2,
    timeout: Annotated[float, typer.Option(help="Seconds a test file may take.", min=1)] = 300,
    generate: Annotated[bool, typer.Option("--generate", help="Write missing tests from the mapping.")] = False,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
) -> None:
    """Run the component tests and judge what the comparator recorded, not what they printed."""

    def action() -> int:
        from equiport.experiment import Experiment
        from equiport.stacks.loading import load_adapter
        from equiport.stages import stage2
        from equiport.stages.frame import StageOptions, exit_code, find_experiment

        options = StageOptions(exp_dir, output, thresholds, force, quiet, debug, seed)
        found = find_experiment(options) or Experiment.find(tests_dir)
        if found is not None and exp_dir is None:
            options = StageOptions(found.root, output, thresholds, force, quiet, debug, seed)
        subject = experiment_subject(options)
        adapter = load_adapter(subject.stack) if subject else None
        stage = stage2.Stage2Options(tests_dir.absolute(), tau_r, timeout, generate)  # tests run in their own folder
        return exit_code(stage2.run(options, stage, subject, adapter).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage2.py."""
    typer.run(command)
