"""What all stages share: options, the port under test, prerequisites, hashing, timing, the result file, exit codes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from equiport import __version__
from equiport.compare.thresholds import Thresholds, load_thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError, ExitCode
from equiport.experiment import BackendStamp, Experiment, ReasonRecord, StageResult
from equiport.experiment.atomic import plain
from equiport.experiment.hashing import hash_inputs, model_files, port_files
from equiport.fixtures.folder import has_weights, read_config
from equiport.stacks.contract import StackAdapter, StackStatus, Tier
from equiport.stacks.patches import apply_patches, patch_files
from equiport.stacks.port_classes import PortClasses
from equiport.stages.hints import next_action
from equiport.stages.port_run import port_fault
from equiport.stages.progress import Progress


@dataclass(frozen=True)
class StageOptions:
    """Flags that every script has. `exp_dir` None: found from `output`'s parents, else standalone."""

    exp_dir: Path | None = None
    output: Path | None = None
    thresholds: Path | None = None
    force: bool = False
    quiet: bool = False
    debug: bool = False
    seed: int = 42
    patches_dir: Path | None = None


@dataclass(frozen=True)
class Subject:
    """The port under test and the model it must equal."""

    model_path: Path
    classes: PortClasses
    stack: str
    tp_degree: int = 1

    @property
    def modeling_file(self) -> Path:
        """The port's modeling file."""
        return self.classes.modeling_file


@dataclass
class Outcome:
    """What a stage's body found; `run_stage` makes a StageResult of it."""

    verdict: Verdict
    reasons: Sequence[Reason] = ()
    metrics: BaseModel | None = None
    blind_spots: Sequence[str] = ()
    seeds: Sequence[int] = ()
    inputs: Sequence[Path] = ()


@dataclass(frozen=True)
class StageContext:
    """What a body gets: the experiment (None: standalone), the loaded adapter, thresholds and progress."""

    experiment: Experiment | None
    subject: Subject | None
    adapter: StackAdapter | None
    thresholds: Thresholds
    options: StageOptions
    progress: Progress

    @property
    def port(self) -> Subject:
        """The subject; stages that run the port have one."""
        if self.subject is None:
            raise EquiportError(
                "this stage needs a port", remedy="Give --model-path, --model-class and --config-class."
            )
        return self.subject

    @property
    def stack(self) -> StackAdapter:
        """The adapter; stages that run the port have one."""
        if self.adapter is None:
            raise EquiportError("this stage needs a stack", remedy="Give --target-stack.")
        return self.adapter

    @property
    def debug(self) -> bool:
        """Whether tracebacks are wanted."""
        return self.options.debug

    def weights_folder(self) -> Path:
        """The HF folder that both sides load: the model's own, or the synthetic weights of a config-only folder."""
        own = self.port.model_path
        if has_weights(own):
            return own
        synthetic = self.experiment.root / "fixtures" / "synthetic" if self.experiment else None
        if synthetic is not None and has_weights(synthetic):
            return synthetic
        raise EquiportError(
            "holds no *.safetensors weights",
            where=own,
            remedy="Add the weights; or run stage 0 in an experiment, which draws synthetic ones for a config alone.",
        )


Body = Callable[[StageContext], Outcome]


@dataclass(frozen=True)
class StageSpec:
    """Number, title, and needs: stage -> must it be PASS (else: have run). `any_of`: one of these must be PASS."""

    number: int
    title: str
    needs: Mapping[int, bool] = field(default_factory=dict)
    any_of: tuple[int, ...] = ()


def run_stage(
    spec: StageSpec,
    options: StageOptions,
    body: Body,
    *,
    subject: Subject | None = None,
    adapter: StackAdapter | None = None,
    settings: Mapping[str, Any] | None = None,
) -> StageResult:
    """Check prerequisites, run the body, stamp and store the result, print verdict and next action.

    Raises:
        PrerequisiteError: a needed stage is missing, stale or did not pass, and --force is not given.
    """
    experiment = find_experiment(options)
    forced = _check_needs(spec, experiment, options)
    thresholds = load_thresholds(options.thresholds) if options.thresholds else Thresholds()
    status = adapter.check_environment() if adapter else None
    progress = Progress(quiet=options.quiet)
    progress.begin(spec.number, spec.title, status)
    if experiment is None:
        progress.line("standalone: not part of an experiment (no equiv_config.json above)")
    context = StageContext(experiment, subject, adapter, thresholds, options, progress)
    patches = _apply_patches(options, subject, adapter, progress)
    started, clock = datetime.now(timezone.utc), time.monotonic()
    outcome = _run_body(body, context)
    inputs = [
        *_subject_inputs(subject, experiment),
        *outcome.inputs,
        *([options.thresholds] if options.thresholds else []),
    ]
    inputs += patch_files(options.patches_dir) if options.patches_dir else []
    result = StageResult(
        stage=spec.number,
        verdict=outcome.verdict,
        reasons=[ReasonRecord.of(reason) for reason in outcome.reasons],
        metrics=plain(outcome.metrics) if outcome.metrics else {},
        blind_spots=list(outcome.blind_spots),
        inputs=hash_inputs(inputs, experiment.root if experiment else None),
        settings={**(settings or {}), "seed": options.seed, **({"patches": patches} if patches else {})},
        backend=stamp(status) if status else None,
        seeds=list(outcome.seeds),
        forced=forced,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - clock, 3),
        tool_version=__version__,
    )
    for path in dict.fromkeys(_result_paths(spec, experiment, options)):
        result.save(path)
    progress.verdict(result, next_action(spec.number, result.verdict))
    return result


def _apply_patches(
    options: StageOptions, subject: Subject | None, adapter: StackAdapter | None, progress: Progress
) -> list[str]:
    """Names of the patches that were applied to the port's classes."""
    if options.patches_dir is None:
        return []
    if subject is None or adapter is None:
        raise EquiportError(
            "there is no port to patch", field="--patches-dir", remedy="Name the port, or leave it out."
        )
    applied = apply_patches(adapter, subject.modeling_file, options.patches_dir)
    for patch in applied:
        progress.line(f"patch {patch.file.name}: {', '.join(patch.functions)} changes {', '.join(patch.changed)}")
    return [patch.file.name for patch in applied]


def _run_body(body: Body, context: StageContext) -> Outcome:
    """An error that the port itself raises is a FAIL with its place; anything else goes up."""
    try:
        return body(context)
    except EquiportError:
        raise
    except Exception as error:
        subject, adapter = context.subject, context.adapter
        if subject is None or adapter is None or context.debug:
            raise
        reason = port_fault(error, [subject.modeling_file, *adapter.source_roots()])
        if reason is None:
            raise
        return Outcome(Verdict.FAIL, [reason])


def find_experiment(options: StageOptions) -> Experiment | None:
    """The experiment named by --exp-dir, or the one that holds --output."""
    if options.exp_dir:
        return Experiment.open(options.exp_dir)
    return Experiment.find(options.output.parent) if options.output else None


def stamp(status: StackStatus) -> BackendStamp:
    """The status as stored in results."""
    kind = "stand-in" if status.tier is Tier.STAND_IN else "real"
    return BackendStamp(
        name=status.name, version=status.version, kind=kind, device=status.device, headline=status.headline
    )


def exit_code(verdict: Verdict) -> ExitCode:
    """The process's exit code for a verdict."""
    return {
        Verdict.PASS: ExitCode.PASS,
        Verdict.FAIL: ExitCode.FAIL,
        Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
        Verdict.NOT_RUN: ExitCode.PREREQUISITE,
    }[verdict]


def vocabulary_size(folder: Path) -> int:
    """`vocab_size` of the folder's config.json.

    Raises:
        EquiportError: the field is missing.
    """
    value = read_config(folder).get("vocab_size")
    if not isinstance(value, int) or value < 2:
        raise EquiportError(
            "missing or no integer", where=folder / "config.json", field="vocab_size", remedy="Complete the config."
        )
    return value


def _check_needs(spec: StageSpec, experiment: Experiment | None, options: StageOptions) -> bool:
    if experiment is None:
        return False
    forced = experiment.require(spec.number, dict(spec.needs), force=options.force)
    if spec.any_of and not any(_passed(experiment, number) for number in spec.any_of):
        first = spec.any_of[0]
        forced = experiment.require(spec.number, {first: True}, force=options.force) or forced
    return forced


def _passed(experiment: Experiment, number: int) -> bool:
    result = experiment.result(number)
    return result is not None and result.verdict is Verdict.PASS and experiment.freshness(number).fresh


def _subject_inputs(subject: Subject | None, experiment: Experiment | None) -> list[Path]:
    if subject is None:
        return []
    own = [*model_files(subject.model_path), *port_files(subject.modeling_file)]
    drawn = experiment.root / "fixtures" / "synthetic" if experiment and not has_weights(subject.model_path) else None
    return [*own, *(model_files(drawn) if drawn else [])]


def _result_paths(spec: StageSpec, experiment: Experiment | None, options: StageOptions) -> list[Path]:
    paths = [experiment.result_path(spec.number)] if experiment else []
    return [*paths, *([options.output.absolute()] if options.output else [])]
