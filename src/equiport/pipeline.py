"""The loop behind `equiport validate`: each stage is its script, run with the experiment's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from equiport.compare.thresholds import Thresholds, load_thresholds
from equiport.compare.verdict import Verdict
from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.experiment import EquivConfig, Experiment
from equiport.experiment.config import CONFIG_NAME
from equiport.fixtures.folder import has_weights, read_config, tensor_headers
from equiport.intake.experiment import check_runnable, write_source
from equiport.intake.inspection import PortInspection, inspect_port
from equiport.report import loosened, patches_in_force, write_report
from equiport.stacks.detection import detect_stack
from equiport.stacks.loading import load_adapter
from equiport.stacks.patches import patch_files
from equiport.stacks.port_classes import PortClasses, find_port_classes
from equiport.stages import bench_config, downstream_scores
from equiport.stages.frame import StageOptions, Subject, stamp
from equiport.stages.stage0 import write_config
from equiport.stages.stage3 import failed_end_to_end
from equiport.warm import FOR_STAGES, WarmJob, warm_server

STAGES = (0, 1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class PortGiven:
    """What `equiport validate` was given to make an experiment of."""

    port: Path | None = None
    model: Path | None = None
    out: Path | None = None
    inner_class: str | None = None
    causal_class: str | None = None
    config_class: str | None = None
    stack: str | None = None
    tp_size: int | None = None
    thresholds: Path | None = None
    seed: int | None = None

    def flags(self) -> list[str]:
        """The flags that were given."""
        names = {
            "--port": self.port, "--model": self.model, "--out": self.out, "--inner-class": self.inner_class,
            "--causal-class": self.causal_class, "--config-class": self.config_class, "--stack": self.stack,
            "--tp-size": self.tp_size, "--thresholds": self.thresholds, "--seed": self.seed,
        }  # fmt: skip
        return [name for name, value in names.items() if value is not None]


def open_or_make(exp_dir: Path | None, given: PortGiven, through: int | None) -> Experiment:
    """The experiment to run: an existing directory, or a new one from port and model.

    The model is a HuggingFace folder. A config.json, or no model at all (then the port's HuggingFace counterpart has
    its default config), gives a tiny model with synthetic weights in EXP_DIR/source.

    An existing `--out` keeps its results; they are run again where the inputs differ.

    Raises:
        EquiportError: neither or both are given, a stage is asked for that does not exist, or bad input.
        OpenQuestionError: several classes of the port fit.
    """
    if through is not None and through not in STAGES:
        raise EquiportError(
            f"there is no stage {through}",
            field="--through",
            remedy=f"Give one of {', '.join(map(str, STAGES))}.",
        )
    if exp_dir is not None:
        if given.flags():
            raise EquiportError(
                f"an experiment directory and {', '.join(given.flags())} exclude one another",
                remedy="Leave the flags out (equiv_config.json holds them), or give --port, --model and --out instead.",
            )
        experiment = Experiment.open(exp_dir)
        _check_downstream(through, experiment.root, experiment.config.source_model_path)
        return experiment if through is None else _saved(experiment, experiment.config, through)
    missing = [flag for flag, value in (("--port", given.port), ("--out", given.out)) if not value]
    if missing:
        raise EquiportError(
            f"{', '.join(missing)} missing",
            remedy="Give EXP_DIR, or --port PORT.py --out EXP_DIR, and --model HF_DIR.",
        )
    assert given.port and given.out
    inspected = None if _is_folder(given.model) else _inspected(given)
    stack = detect_stack(given.port, given.stack)
    classes = inspected.classes if inspected else _classes(given)
    assert classes is not None
    if given.thresholds:
        load_thresholds(given.thresholds)
    _check_downstream(through, given.out, given.model or given.out)
    model = write_source(inspected, given.out) if inspected else given.model
    assert model is not None
    subject = Subject(model.absolute(), classes, stack, given.tp_size or 1)
    options = StageOptions(thresholds=given.thresholds, seed=42 if given.seed is None else given.seed)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EquiportError(
            f"cannot be made: {error.strerror}", where=given.out, field="--out", remedy="Choose another folder."
        ) from None
    if (given.out / CONFIG_NAME).is_file():
        Experiment.open(given.out)
    last = _default_through(given.out, subject)
    write_config(given.out, subject, options, last if through is None else through)
    return Experiment.open(given.out)


def _is_folder(model: Path | None) -> bool:
    """Whether a HuggingFace folder was given, and a usable one; a file is a config.json.

    Raises:
        EquiportError: no such folder, no config.json in it, or damaged weights.
    """
    if model is None or model.is_file():
        return False
    read_config(model)
    if has_weights(model):
        tensor_headers(model)
    return True


def _inspected(given: PortGiven) -> PortInspection:
    """What `equiport inspect` finds, told to be runnable; its notes are printed."""
    assert given.port
    found = inspect_port(
        given.port,
        model=given.model,
        inner_class=given.inner_class,
        causal_class=given.causal_class,
        config_class=given.config_class,
    )
    check_runnable(found)
    print(f"source: a tiny {found.hf_class} with synthetic weights")
    for note in found.notes:
        print(f"  {note}")
    return found


def _classes(given: PortGiven) -> PortClasses:
    """The port's classes; a port without them is told by its kind."""
    assert given.port
    names = {"inner_class": given.inner_class, "causal_class": given.causal_class, "config_class": given.config_class}
    try:
        return find_port_classes(given.port, **names)
    except OpenQuestionError:
        raise
    except EquiportError:
        if any(names.values()):
            raise
        check_runnable(inspect_port(given.port, model=given.model))
        raise


def _check_downstream(through: int | None, root: Path, model: Path) -> None:
    """Stage 7 is asked for: what it needs must be there before hours of other stages run.

    Raises:
        EquiportError: there is no bench_config.yaml, and no tokenizer for the shipped tasks.
    """
    if through == 7 and not (root / bench_config.FILE_NAME).is_file() and not bench_config.has_tokenizer(model):
        raise EquiportError(
            f"stage 7 needs a {bench_config.FILE_NAME} in the experiment, or a model with a tokenizer",
            where=model,
            field="--through",
            remedy="Give --through 6, or write the file.",
        )


def _default_through(root: Path, subject: Subject) -> int:
    """7 where the model has a tokenizer, else 6. Without a bench_config.yaml, one with the shipped tasks is written."""
    if not bench_config.has_tokenizer(subject.model_path):
        return 6
    if not (root / bench_config.FILE_NAME).is_file():
        port = subject.classes
        bench_config.write_bench_config(
            root, subject.model_path, port.modeling_file, port.causal, port.config, subject.tp_degree
        )
    if not downstream_scores.installed():
        print(f"stage 7 is left out: lm_eval is not installed. {downstream_scores.REMEDY}")
        return 6
    return 7


def _saved(experiment: Experiment, config: EquivConfig, through: int) -> Experiment:
    changed = config.model_copy(update={"through": through})
    changed.save(experiment.root)
    return replace(experiment, config=changed)


def run_pipeline(experiment: Experiment, *, first: int, quiet: bool, debug: bool) -> ExitCode:
    """Run every stage up to `through` that is missing, stale, or numbered `first` and above; then report.

    A failed stage does not stop stages that do not need it. Bad input in a stage stops the loop (exit 2).
    """
    config = experiment.config
    backend = stamp(load_adapter(config.target_stack).check_environment())
    for stage in [number for number in STAGES if number <= config.through]:
        skip = _not_needed(experiment, stage)
        if skip is not None:
            if skip:
                print(skip)
            if stage != 3 or not _fails_end_to_end(experiment):
                experiment.result_path(stage).unlink(missing_ok=True)
            continue
        if stage == 6 and not _done(experiment, 5, backend):
            continue
        if stage < first and _done(experiment, stage, backend):
            result = experiment.result(stage)
            if not quiet and result is not None:
                print(f"Stage {stage} is up to date: {result.verdict.value}")
        else:
            code = _run_script(experiment, stage, quiet=quiet, debug=debug)
            if code is not None:
                return code
        if stage == 4 and _passed(experiment, 4) and not _done(experiment, 1, backend):
            code = _run_script(experiment, 1, quiet=quiet, debug=debug)
            if code is not None:
                return code
    if _fails_end_to_end(experiment) and not _done(experiment, 3, backend):
        code = _run_script(experiment, 3, quiet=quiet, debug=debug)
        if code is not None:
            return code
    written = write_report(Experiment.open(experiment.root))
    print(f"\n{written.headline}\nreport: {written.path}")
    return written.exit_code


def _fails_end_to_end(experiment: Experiment) -> bool:
    """Whether the components pass and stage 5 or 6 does not: localisation then comes last."""
    return _passed(experiment, 2) and failed_end_to_end(experiment) is not None


def _not_needed(experiment: Experiment, stage: int) -> str | None:
    """Why a stage has nothing to do here (empty: not worth a line); None when it is to be run."""
    components = _passed(experiment, 2)
    if stage in (3, 4) and components:
        return ""
    if stage == 4 and not patch_files(experiment.patches):
        return ""
    if stage in (5, 6) and not components and not _passed(experiment, 4):
        return f"Stage {stage} needs stage 2 PASS: not run"
    if stage == 6 and experiment.result(5) is None:
        return "Stage 6 needs stage 5: not run"
    if stage == 7 and not (_passed(experiment, 5) and _passed(experiment, 6)):
        return "Stage 7 needs stages 5 and 6 PASS: not run"
    return None


def _done(experiment: Experiment, stage: int, backend: object) -> bool:
    from equiport.experiment import BackendStamp

    assert isinstance(backend, BackendStamp)
    result = experiment.result(stage)
    if result is None or not experiment.freshness(stage, backend).fresh or result.forced:
        return False
    if stage in (1, 5, 6, 7) and result.settings.get("patches", []) != patches_in_force(experiment):
        return False
    if stage == 7 and result.settings.get("limit") is not None:
        return False  # a quick look at fewer items than the config asks for
    return result.settings.get("seed") == experiment.config.seed and not loosened(experiment, result)


def _passed(experiment: Experiment, stage: int) -> bool:
    result = experiment.result(stage)
    return result is not None and result.verdict is Verdict.PASS


def _run_script(experiment: Experiment, stage: int, *, quiet: bool, debug: bool) -> ExitCode | None:
    """Run a stage's script; None when it gave a verdict, else the code to end with.

    Raises:
        EquiportError: no such interpreter, or the stage was killed.
    """
    config = experiment.config
    interpreter = config.venv / "bin" / "python" if config.venv else Path(sys.executable)
    if not interpreter.is_file():
        raise EquiportError("no such interpreter", where=interpreter, field="VENV", remedy="Correct equiv_config.json.")
    command = [str(content_dir("scripts") / f"run_stage{stage}.py"), *_arguments(experiment, stage)]
    command += ["--exp-dir", str(experiment.root), "--seed", str(config.seed)]
    command += ["--thresholds", str(config.thresholds)] if config.thresholds else []
    patched = stage in (1, 5, 6, 7) and patches_in_force(experiment)
    command += ["--patches-dir", str(experiment.patches)] if patched else []
    command += ["--quiet"] if quiet else []
    command += ["--debug"] if debug else []
    sys.stdout.flush()
    sys.stderr.flush()
    quiet_warnings = {} if debug else {"PYTHONWARNINGS": "ignore"}
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **quiet_warnings, **os.environ, "PYTHONUNBUFFERED": "1"}
    job = warm_server(FOR_STAGES, str(interpreter)).run(command, environment=environment, cwd=Path.cwd())
    code = _ended(job)
    if code < 0:
        raise EquiportError(
            f"stage {stage} was killed by signal {-code}",
            where=experiment.root,
            remedy="Often the memory did not suffice. The same command goes on from this stage.",
        )
    if code in (ExitCode.PASS, ExitCode.FAIL, ExitCode.INCONCLUSIVE):
        return None
    return ExitCode.PREREQUISITE if code == ExitCode.PREREQUISITE else ExitCode.BAD_INPUT


def _ended(job: WarmJob) -> int:
    """The exit code of a stage; interrupted with it, it gets a second to leave nothing half-written."""
    try:
        return job.wait()
    except BaseException:
        try:
            job.wait(1.0)
        except subprocess.TimeoutExpired:
            job.kill()
        raise


def _arguments(experiment: Experiment, stage: int) -> list[str]:
    config, file = experiment.config, str(experiment.config.target_modeling_file)
    model = str(config.source_model_path)
    limits = load_thresholds(config.thresholds) if config.thresholds else Thresholds()
    causal = config.target_causal_class or find_port_classes(config.target_modeling_file).causal
    port = [
        "--model-path", model,
        "--model-class", f"{file}:{causal}",
        "--config-class", f"{file}:{config.target_config_class}",
        "--tp-size", str(config.tp_degree),
    ]  # fmt: skip
    if stage == 0:
        return [
            "--source-model-path", model,
            "--target-model-path", model,
            "--target-module-file", file,
            "--target-inner-class", config.target_inner_class,
            "--target-config-class", config.target_config_class,
            "--target-causal-class", causal,
            "--target-stack", config.target_stack,
            "--tp-size", str(config.tp_degree),
            "--output-dir", str(experiment.model_tree),
        ]  # fmt: skip
    if stage == 2:
        return ["--tests-dir", str(experiment.tests), "--generate", "--tau-r", str(limits.r_single)]
    if stage == 1:
        return [*port, "--pass-threshold", str(limits.match_rate)]
    if stage == 4:
        return ["--patches-dir", str(experiment.patches), "--stage2-output", str(experiment.result_path(2))]
    if stage == 3:
        return ["--stage2-output", str(experiment.result_path(2))]
    if stage == 7:
        file = str(experiment.root / bench_config.FILE_NAME)
        return ["--bench-config", file, "--output-dir", str(experiment.results / "stage7"), "--diagnose-failures"]
    if stage == 6:
        return ["--teacher-forced", str(experiment.results / "teacher_forced.json")]
    return port
