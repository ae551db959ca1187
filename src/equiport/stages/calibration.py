"""Read results of ports known to be good; refuse what is not proven, stale or damaged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from equiport.compare.calibration import Calibration, Change, calibrate
from equiport.compare.logits import LogitComparison
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment, StageResult, load_result
from equiport.experiment.atomic import read_json, write_json
from equiport.experiment.hashing import sha256
from equiport.stages.stage2 import ComponentMetrics
from equiport.stages.teacher_forced import TeacherForcedFile

_REMEDY = "Leave it out, or validate that port again."


@dataclass(frozen=True)
class Calibrated:
    """The new thresholds, each beside the shipped one, and how many ports they rest on."""

    thresholds: Thresholds
    changes: tuple[Change, ...]
    ports: int


def run_calibration(
    stage2_outputs: Sequence[Path], teacher_forced_outputs: Sequence[Path], how: Calibration, output: Path
) -> Calibrated:
    """Derive thresholds and write them to `output`, a file for --thresholds.

    Raises:
        EquiportError: a result is missing, damaged, not PASS, forced or stale, is given twice, or compared nothing.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    ports = set()
    for file in _distinct(stage2_outputs, "--stage2-outputs"):
        result = _proven(file, 2)
        ports.add(_port_of(result))
        for row in _components(result, file).rows:
            if row.r_geomean is not None:
                ratios[row.component_type].append(row.r_geomean)
    paths: list[LogitComparison] = []
    for file in _distinct(teacher_forced_outputs, "--teacher-forced-outputs"):
        stored = _teacher_forced(file)
        ports.add(_port_of(_proven(file.parent / "stage5.json", 5)))
        paths += [found for _, found in stored.paths.items()]
    thresholds, changes = calibrate(ratios, paths, how)
    write_json(output, thresholds.model_dump())
    return Calibrated(thresholds, tuple(changes), len(ports))


def _proven(file: Path, stage: int) -> StageResult:
    """The result of `stage` in `file`, if it is a PASS that still holds."""
    result = load_result(file)
    if result.stage != stage:
        raise EquiportError(f"is a result of stage {result.stage}, not {stage}", where=file, remedy="Check the flags.")
    if result.verdict is not Verdict.PASS:
        raise EquiportError(f"is {result.verdict.value}: no known-good port", where=file, remedy=_REMEDY)
    if result.forced:
        raise EquiportError("was forced past a missing or failed stage", where=file, remedy=_REMEDY)
    experiment = Experiment.find(file.absolute().parent)
    root = experiment.root if experiment else file.absolute().parent
    changed = [name for name, digest in result.inputs.items() if not _still(root, name, digest)]
    if experiment and experiment.result_path(stage) == file.resolve():
        changed = list(experiment.freshness(stage).changed)
    if changed or not result.inputs:
        raise EquiportError(f"is stale ({', '.join(changed) or 'no inputs'} changed)", where=file, remedy=_REMEDY)
    return result


def _still(root: Path, name: str, digest: str) -> bool:
    path = root / name  # an absolute name stays as it is
    return path.is_file() and sha256(path) == digest


def _components(result: StageResult, file: Path) -> ComponentMetrics:
    try:
        metrics = ComponentMetrics.model_validate(result.metrics)
    except ValidationError as error:
        raise _damaged(error, file, "metrics.") from None
    if not metrics.rows:
        raise EquiportError("compared no component", where=file, field="metrics.rows", remedy=_REMEDY)
    return metrics


def _teacher_forced(file: Path) -> TeacherForcedFile:
    """teacher_forced.json, with the PASS of stage 6 that judged this very file beside it."""
    try:
        stored = TeacherForcedFile.model_validate(read_json(file, remedy=_REMEDY))
    except ValidationError as error:
        raise _damaged(error, file, "") from None
    beside = file.parent / "stage6.json"
    judged = _proven(beside, 6)
    if sha256(file) not in judged.inputs.values():
        raise EquiportError("is not what stage 6 judged: it changed since", where=file, remedy=_REMEDY)
    return stored


def _damaged(error: ValidationError, file: Path, prefix: str) -> EquiportError:
    first = error.errors()[0]
    field = prefix + ".".join(str(part) for part in first["loc"])
    return EquiportError(f"is damaged: {first['msg']}", where=file, field=field, remedy=_REMEDY)


def _distinct(files: Sequence[Path], flag: str) -> Sequence[Path]:
    seen = set()
    for file in files:
        if file.resolve() in seen:
            raise EquiportError("is given twice", where=file, field=flag, remedy="Name each result once.")
        seen.add(file.resolve())
    return files


def _port_of(result: StageResult) -> str:
    """A port is known by the digests of its Python files and weights; tests lie in the experiment's tests/."""
    named = (item for item in result.inputs.items() if not item[0].startswith("tests/"))
    return " ".join(sorted(digest for name, digest in named if name.endswith((".py", ".safetensors"))))
