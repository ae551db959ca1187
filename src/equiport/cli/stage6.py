"""run_stage6.py: cosine, KL and top-1 from teacher_forced.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Delta, ExpDir, Force, Output, PatchesDir, Quiet, Seed, Theta, ThresholdsFile


def command(
    teacher_forced: Annotated[Path, typer.Option(help="What stage 5 wrote.")],
    theta: Theta = None,
    delta: Delta = None,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
    patches_dir: PatchesDir = None,
) -> None:
    """Judge the distributions that stage 5 stored."""

    def action() -> int:
        from equiport.cli.flags import experiment_subject
        from equiport.experiment import Experiment
        from equiport.stacks.loading import load_adapter
        from equiport.stages.frame import StageOptions, exit_code
        from equiport.stages.teacher_forced import TeacherForcedOptions, run_stage6

        found = Experiment.open(exp_dir) if exp_dir else Experiment.find(teacher_forced.parent)
        options = StageOptions(
            found.root if found else None, output, thresholds, force, quiet, debug, seed, patches_dir
        )
        subject = experiment_subject(options)
        adapter = load_adapter(subject.stack) if subject else None
        stage = TeacherForcedOptions(theta=theta, delta=delta)
        return exit_code(run_stage6(options, stage, teacher_forced, subject, adapter).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage6.py."""
    typer.run(command)
