"""run_stage7.py: downstream tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, ExpDir, Force, PatchesDir, Quiet, Seed, ThresholdsFile


def command(
    bench_config: Annotated[Path, typer.Option(help="bench_config.yaml: the port, its model, the tasks.")],
    output_dir: Annotated[Path, typer.Option(help="Where lm_eval's output goes, e.g. EXP_DIR/results/stage7.")],
    tolerance: Annotated[float, typer.Option(help="A task may fall by this much.", min=0.0001, max=1)] = 0.02,
    limit: Annotated[int | None, typer.Option(help="Items a task, instead of the config's.", min=1)] = None,
    diagnose_failures: Annotated[
        bool, typer.Option("--diagnose-failures", help="List the items that both sides answer differently.")
    ] = False,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
    patches_dir: PatchesDir = None,
) -> None:
    """Scores of the port on lm_eval tasks against the source model's, item by item."""

    def action() -> int:
        from equiport.cli.flags import subject_from
        from equiport.experiment import Experiment
        from equiport.stacks.loading import load_adapter
        from equiport.stages import stage7
        from equiport.stages.bench_config import load_bench_config
        from equiport.stages.frame import StageOptions, exit_code

        model = load_bench_config(bench_config).model
        subject = subject_from(model.model_path, model.model_class, model.config_class, model.tp_degree)
        found = Experiment.open(exp_dir) if exp_dir else Experiment.find(output_dir.absolute())
        output = None if found else output_dir / "stage7.json"
        root = found.root if found else None
        options = StageOptions(root, output, thresholds, force, quiet, debug, seed, patches_dir)
        stage = stage7.Stage7Options(bench_config, output_dir, tolerance, limit, diagnose_failures)
        return exit_code(stage7.run(options, stage, subject, load_adapter(subject.stack)).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage7.py."""
    typer.run(command)
