"""run_stage4.py: apply patches, test the components again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, ExpDir, Force, Output, Quiet, Seed, ThresholdsFile


def command(
    patches_dir: Annotated[Path | None, typer.Option(help="Folder of patches. [default: EXP_DIR/patches]")] = None,
    stage2_output: Annotated[Path | None, typer.Option(help="Before. [default: EXP_DIR/results/stage2.json]")] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="First write patches for the causes that stage 3 proved.")
    ] = False,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
) -> None:
    """Apply standalone patches (idempotent, the port's files untouched) and run stage 2 again, before and after."""

    def action() -> int:
        from equiport.cli.flags import subject_of
        from equiport.errors import EquiportError
        from equiport.experiment import Experiment
        from equiport.stacks.loading import load_adapter
        from equiport.stages import stage4
        from equiport.stages.frame import StageOptions, exit_code

        start = exp_dir or patches_dir or (stage2_output.parent if stage2_output else Path())
        experiment = Experiment.open(exp_dir) if exp_dir else Experiment.find(start)
        if experiment is None:
            raise EquiportError("no experiment there", where=start, field="--exp-dir", remedy="Give the experiment.")
        subject = subject_of(experiment)
        options = StageOptions(experiment.root, output, thresholds, force, quiet, debug, seed)
        stage = stage4.Stage4Options(
            patches_dir or experiment.patches,
            stage2_output or experiment.result_path(2),
            experiment.tests,
            draft,
            experiment.result_path(3),
        )
        return exit_code(stage4.run(options, stage, subject, load_adapter(subject.stack)).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage4.py."""
    typer.run(command)
