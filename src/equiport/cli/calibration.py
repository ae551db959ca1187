"""run_calibration.py: thresholds from ports known to be good."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet
from equiport.errors import EquiportError

_LISTS = ("--stage2-outputs", "--teacher-forced-outputs")


def command(
    output: Annotated[Path, typer.Option(help="Thresholds file to write, for --thresholds.")],
    stage2_outputs: Annotated[list[Path] | None, typer.Option(help="results/stage2.json of good ports.")] = None,
    teacher_forced_outputs: Annotated[
        list[Path] | None, typer.Option(help="results/teacher_forced.json of good ports, stages 5 and 6 beside them.")
    ] = None,
    r_quantile: Annotated[float, typer.Option(help="Quantile of R.", min=0.5, max=1)] = 0.99,
    kl_quantile: Annotated[float, typer.Option(help="Quantile of KL over positions.", min=0.5, max=1)] = 0.95,
    safety_margin: Annotated[float, typer.Option(help="Factor on the quantile.", min=1, max=10)] = 1.1,
    exp_dir: Annotated[Path | None, typer.Option(help="A good port's experiment: its results are added.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Refused: limits rest on results that hold.")] = False,
    seed: Annotated[int | None, typer.Option(help="Refused: nothing is drawn here.")] = None,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Derive R limits by component type, and tau_r, theta and delta; every limit is shown beside the shipped one."""

    def action() -> int:
        from equiport.compare.calibration import Calibration
        from equiport.experiment import Experiment
        from equiport.stages.calibration import run_calibration

        _refuse(force, seed)
        stage2, teacher_forced = list(stage2_outputs or []), list(teacher_forced_outputs or [])
        if exp_dir is not None:
            stage2.append(Experiment.open(exp_dir).result_path(2))
            beside = stage2[-1].parent / "teacher_forced.json"
            teacher_forced += [beside] if beside.is_file() else []
        if not stage2:
            raise EquiportError(
                "no results are given", field="--stage2-outputs", remedy="Name results/stage2.json files, or --exp-dir."
            )
        how = Calibration(r_quantile, kl_quantile, safety_margin)
        found = run_calibration(stage2, teacher_forced, how, output)
        for change in found.changes:
            if change.looser or not quiet:
                print(change.line())
        looser = sum(change.looser for change in found.changes)
        ports = "1 port" if found.ports == 1 else f"{found.ports} ports"
        print(f"{output}: from {ports}; {looser} limits are looser than shipped")
        if not teacher_forced:
            print("θ, δ and τ_R end to end are not calibrated: no --teacher-forced-outputs")
        return 0

    run_command(action, debug=debug)


def _refuse(force: bool, seed: int | None) -> None:
    if force:
        raise EquiportError(
            "is not taken here: results that failed, were forced or are stale say nothing of good ports",
            field="--force",
            remedy="Leave it out, or validate those ports again.",
        )
    if seed is not None:
        raise EquiportError(
            "is not taken here: nothing is drawn, the results' own seeds count", field="--seed", remedy="Leave it out."
        )


def repeated(arguments: list[str]) -> list[str]:
    """`--flag a b c` as `--flag a --flag b --flag c`, for the flags that take several files."""
    out: list[str] = []
    flag = ""
    for word in arguments:
        if word.startswith("-"):
            flag = word if word in _LISTS else ""
            if not flag:
                out.append(word)
        elif flag:
            out += [flag, word]
        else:
            out.append(word)
    return out


def main() -> None:
    """Entry point of run_calibration.py."""
    sys.argv[1:] = repeated(sys.argv[1:])
    typer.run(command)
