"""run_stage5.py: end to end, teacher forced; R and R32."""

from __future__ import annotations

from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import (
    CompiledModelPath,
    ConfigClass,
    Debug,
    Delta,
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
    TauR,
    Theta,
    ThresholdsFile,
    TpSize,
)
from equiport.cli.teacher_forced import compare


def command(
    model_path: ModelPath,
    model_class: ModelClass,
    config_class: ConfigClass,
    compiled_model_path: CompiledModelPath = None,
    num_tokens: NumTokens = 32,
    theta: Theta = None,
    delta: Delta = None,
    tau_r: TauR = None,
    prompts: PromptsFile = None,
    tp_size: TpSize = 1,
    kv_analysis_on_fail: Annotated[bool, typer.Option("--kv-analysis-on-fail")] = False,
    output: Output = None,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
    patches_dir: PatchesDir = None,
) -> None:
    """Stage 5 alone: teacher-forced comparison on decode and prefill, judged by R and R32."""

    def action() -> int:
        return compare(
            model_path, model_class, config_class, compiled_model_path, num_tokens, theta, delta, tau_r, prompts,
            tp_size, kv_analysis_on_fail, output, exp_dir, thresholds, force, debug, quiet, seed, patches_dir,
            with_stage6=False,
        )  # fmt: skip

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage5.py."""
    typer.run(command)
