"""run_teacher_forced_comparison.py: stages 5 and 6 in one pass."""

from __future__ import annotations

from pathlib import Path
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
    subject_from,
)


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
    """Compare source and port under teacher forcing: R and R32 (stage 5), cosine, KL and top-1 (stage 6)."""

    def action() -> int:
        return compare(
            model_path, model_class, config_class, compiled_model_path, num_tokens, theta, delta, tau_r, prompts,
            tp_size, kv_analysis_on_fail, output, exp_dir, thresholds, force, debug, quiet, seed, patches_dir,
            with_stage6=True,
        )  # fmt: skip

    run_command(action, debug=debug)


def compare(
    model_path: Path, model_class: str, config_class: str, compiled: Path | None, num_tokens: int,
    theta: float | None, delta: float | None, tau_r: float | None, prompts: Path | None, tp_size: int, kv: bool,
    output: Path | None, exp_dir: Path | None, thresholds: Path | None, force: bool, debug: bool, quiet: bool,
    seed: int, patches_dir: Path | None, *, with_stage6: bool,
) -> int:  # fmt: skip
    """Run stage 5, and stage 6 on what it wrote; the worse verdict's exit code."""
    from equiport.compare.verdict import combine
    from equiport.stacks.loading import load_adapter
    from equiport.stages.frame import StageOptions, exit_code, find_experiment
    from equiport.stages.teacher_forced import FILE_NAME, TeacherForcedOptions, run_stage5, run_stage6

    subject = subject_from(model_path, model_class, config_class, tp_size)
    options = StageOptions(exp_dir, output, thresholds, force, quiet, debug, seed, patches_dir)
    stage = TeacherForcedOptions(num_tokens, theta, delta, tau_r, prompts, compiled, kv)
    adapter = load_adapter(subject.stack)
    verdicts = [run_stage5(options, stage, subject, adapter).verdict]
    found = find_experiment(options)
    file = output or (found.results / FILE_NAME if found else None)
    if with_stage6 and file is not None and file.is_file():
        six = StageOptions(found.root if found else None, None, thresholds, force, quiet, debug, seed, patches_dir)
        verdicts.append(run_stage6(six, stage, file, subject, adapter).verdict)
    return exit_code(combine(verdicts))


def main() -> None:
    """Entry point of run_teacher_forced_comparison.py."""
    typer.run(command)
