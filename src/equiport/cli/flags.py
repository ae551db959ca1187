"""Flags that several commands share, declared once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equiport.errors import EquiportError

if TYPE_CHECKING:
    from equiport.stages.frame import StageOptions, Subject

ExpDir = Annotated[Path | None, typer.Option("--exp-dir", help="Experiment directory; else found from the output.")]
Output = Annotated[Path | None, typer.Option("--output", help="Also write the result here.")]
ThresholdsFile = Annotated[Path | None, typer.Option("--thresholds", help="Thresholds file (JSON).")]
Force = Annotated[bool, typer.Option("--force", help="Run although a needed stage is missing, stale or failed.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of tokens and weights.")]
ModelPath = Annotated[Path, typer.Option("--model-path", help="HuggingFace folder of the source model.")]
CompiledModelPath = Annotated[
    Path | None, typer.Option("--compiled-model-path", help="Compiled model; absent: CPU mode.")
]
ModelClass = Annotated[str, typer.Option("--model-class", help="FILE:CLASS of the port's causal-LM.")]
ConfigClass = Annotated[str, typer.Option("--config-class", help="FILE:CLASS of the port's config.")]
NumTokens = Annotated[int, typer.Option("--num-tokens", min=1, help="Greedy tokens a prompt.")]
PromptsFile = Annotated[Path | None, typer.Option("--prompts", help="Text file, one prompt a line.")]
PatchesDir = Annotated[Path | None, typer.Option("--patches-dir", help="Apply the patches of this folder first.")]
TpSize = Annotated[int, typer.Option("--tp-size", min=1, help="Tensor-parallel degree.")]
Theta = Annotated[float | None, typer.Option("--theta", help="Centred cosine p5 must reach this. [shipped: 0.995]")]
Delta = Annotated[float | None, typer.Option("--delta", help="KL p95 limit in nats. [shipped: 0.01]")]
NxdiSource = Annotated[
    Path | None,
    typer.Option("--nxdi-src", help="Source folder of NxD Inference: the real packages, in CPU mode."),
]
NxdSource = Annotated[Path | None, typer.Option("--nxd-src", help="Source folder of NxD; goes with --nxdi-src.")]
TauR = Annotated[float | None, typer.Option("--tau-r", help="Pooled centred R limit. [shipped: 1.2]")]


def use_sources(nxdi_src: Path | None, nxd_src: Path | None) -> None:
    """Make this process, and those it starts, run ports on the real packages of these source folders.

    A folder that is not given stays what the environment says.

    Raises:
        EquiportError: no such folder.
    """
    for flag, variable, folder in (
        ("--nxdi-src", "EQUIPORT_NXDI_SRC", nxdi_src),
        ("--nxd-src", "EQUIPORT_NXD_SRC", nxd_src),
    ):
        if folder is None:
            continue
        if not folder.is_dir():
            raise EquiportError("no such folder", where=folder, field=flag, remedy="Give the repository's folder.")
        os.environ[variable] = str(folder.absolute())


def split_class(text: str, flag: str) -> tuple[Path, str]:
    """`FILE:CLASS` -> (file, class).

    Raises:
        EquiportError: no such form, or no such file.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not file or not name:
        raise EquiportError(f"{text!r} is not FILE:CLASS", field=flag, remedy="Write path/to/modeling.py:ClassName.")
    if not Path(file).is_file():
        raise EquiportError("no such file", where=file, field=flag, remedy="Check the path.")
    return Path(file), name


def subject_from(model_path: Path, model_class: str, config_class: str, tp_size: int) -> Subject:
    """The port and its model from the flags of seed 003.

    Raises:
        EquiportError: bad paths or classes, or both classes are not in one port.
    """
    from equiport.fixtures.folder import read_config
    from equiport.stacks.detection import detect_stack
    from equiport.stacks.port_classes import find_port_classes
    from equiport.stages.frame import Subject

    read_config(model_path)
    file, causal = split_class(model_class, "--model-class")
    other, config = split_class(config_class, "--config-class")
    if other.resolve() != file.resolve():
        raise EquiportError(
            f"is in another file than --model-class ({file})",
            where=other,
            field="--config-class",
            remedy="Name one modeling file in both; it may import the config class from the other.",
        )
    classes = find_port_classes(file, causal_class=causal, config_class=config)
    return Subject(model_path.absolute(), classes, detect_stack(file), tp_size)


def experiment_subject(options: StageOptions) -> Subject | None:
    """The port that the experiment's equiv_config.json names; None when the run is standalone."""
    from equiport.stages.frame import find_experiment

    experiment = find_experiment(options)
    return subject_of(experiment) if experiment else None


def subject_of(experiment: object) -> Subject:
    """The port of an experiment."""
    from equiport.experiment import Experiment
    from equiport.stacks.port_classes import PortClasses
    from equiport.stages.frame import Subject

    assert isinstance(experiment, Experiment)
    config = experiment.config
    classes = PortClasses(
        config.target_modeling_file,
        inner=config.target_inner_class,
        causal=config.target_causal_class or "",
        config=config.target_config_class,
    )
    return Subject(config.source_model_path, classes, config.target_stack, config.tp_degree)
