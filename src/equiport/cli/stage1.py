"""run_stage1.py: the smoke test."""

from __future__ import annotations

from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import (
    CompiledModelPath,
    ConfigClass,
    Debug,
    ExpDir,
    Force,
    ModelClass,
    ModelPath,
    NumTokens,
    Output,
    PatchesDir,
    PromptsFile,
    Quiet,
    Seed,
    ThresholdsFile,
    TpSize,
    subject_from,
)


def command(
    model_path: ModelPath,
    model_class: ModelClass,
    config_class: ConfigClass,
    compiled_model_path: CompiledModelPath = None,
    num_tokens: NumTokens = 32,
    pass_threshold: Annotated[float, typer.Option(help="Overall match rate must exceed this.", min=0, max=1)] = 0.30,
    prompts: PromptsFile = None,
    tp_size: TpSize = 1,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
    patches_dir: PatchesDir = None,
) -> None:
    """Greedy tokens of ten prompts against the fp32 reference: is the port alive?"""

    def action() -> int:
        from equiport.stacks.loading import load_adapter
        from equiport.stages import stage1
        from equiport.stages.frame import StageOptions, exit_code

        subject = subject_from(model_path, model_class, config_class, tp_size)
        options = StageOptions(exp_dir, output, thresholds, force, quiet, debug, seed, patches_dir)
        stage = stage1.Stage1Options(num_tokens, pass_threshold, prompts, compiled_model_path)
        return exit_code(stage1.run(options, stage, subject, load_adapter(subject.stack)).verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage1.py."""
    typer.run(command)
