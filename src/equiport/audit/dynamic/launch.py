"""Run the dynamic checks on the tests of a folder, each group of files in its own process, and add what they say."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from equiport import __version__
from equiport.audit.dynamic.contract import JobResult, RunResult, RunResults, RunSpec, RunSpecs
from equiport.audit.dynamic.findings import Places, dynamic_report, findings_of
from equiport.audit.engine import let_stand
from equiport.audit.model import Role, Severity
from equiport.audit.paraphrase import imported_families
from equiport.audit.report import AuditReport, DynamicReport, Finding
from equiport.audit.source import ParsedModule
from equiport.audit.work import Work, read_work
from equiport.content import content_dir

_SOURCE = Path(__file__).resolve().parents[3]
_GRACE = 20.0
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_MODULE = "equiport.audit.dynamic.runner"


@dataclass(frozen=True)
class DynamicOptions:
    """Limits: seconds for a whole group of files and for one job of it, memory in MB, processes side by side.

    `jobs`: which to run beside the control and the probe; empty: all.
    """

    seconds: float = 120.0
    job_seconds: float = 60.0
    memory_mb: int = 8192
    workers: int = 2
    most_bugs: int = 6
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Test files of one folder, with the port's files that they may import and the folders to import from."""

    folder: Path
    tests: tuple[Path, ...]
    port_files: tuple[Path, ...]
    paths: tuple[Path, ...]
    families: tuple[str, ...]
    others: tuple[Path, ...]

    @property
    def key(self) -> str:
        """Content of everything that the checks may depend on."""
        digest = hashlib.sha256(f"{__version__} {sys.version} {_toolkit()}".encode())
        for name in ("torch", "transformers", "numpy", "pytest"):
            digest.update(f"{name} {metadata.version(name)}".encode())
        for file in sorted({*self.tests, *self.port_files, *self.others}):
            digest.update(file.name.encode())
            digest.update(file.read_bytes() if file.is_file() else b"")
        return digest.hexdigest()


@lru_cache(maxsize=1)
def _toolkit() -> str:
    """Content of the toolkit itself: other comparators, other answers."""
    digest = hashlib.sha256()
    for file in sorted((_SOURCE / "equiport").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def groups(work: Work, extra: Sequence[Path] = ()) -> list[Group]:
    """The test files of a work folder by folder; ports in folders with tests of their own belong to those alone."""
    tests = [module for module in work.modules if _holds_tests(module)]
    folders = sorted({module.path.parent for module in tests})
    found = []
    for folder in folders:
        ports = [
            module.path
            for module in work.modules
            if module.role in (Role.PORT, Role.PATCH)
            and (module.path.parent == folder or module.path.parent not in folders)
        ]
        own = [module for module in work.modules if module.path.parent == folder]
        near = [module.path for module in work.modules if module.path.parent not in folders]
        paths = dict.fromkeys([folder.parent, *(path.parent for path in ports), *extra])
        found.append(
            Group(
                folder.absolute(),
                tuple(module.path.absolute() for module in tests if module.path.parent == folder),
                tuple(path.absolute() for path in ports),
                tuple(path.absolute() for path in paths),
                imported_families(own),
                tuple(path.absolute() for path in [*(module.path for module in own), *near]),
            )
        )
    return found


def _holds_tests(module: ParsedModule) -> bool:
    name = module.path.name
    return module.role is Role.TEST and name != "conftest.py" and not module.opaque


def run_groups(chosen: Sequence[Group], options: DynamicOptions) -> list[RunResult]:
    """Run the checks on groups, in one process; what goes wrong with it is in the results of those it did not reach."""
    if not chosen:
        return []
    with tempfile.TemporaryDirectory(prefix="equiport-audit-") as place:
        scratch = Path(place).resolve()
        specs = RunSpecs(runs=[_spec(group, options, scratch / str(n)) for n, group in enumerate(chosen)])
        seconds = (options.seconds * 1.5 + _GRACE) * len(chosen)
        text, said = start_limited(_MODULE, specs.model_dump_json(), scratch, seconds)
        try:
            found = RunResults.model_validate_json(text).runs
        except ValidationError:
            found = []
        broken = RunResult(jobs=[JobResult(job="collect", ended="died", detail=said)])
        return [*found, *[broken] * (len(chosen) - len(found))]


def _spec(group: Group, options: DynamicOptions, scratch: Path) -> RunSpec:
    scratch.mkdir()
    return RunSpec(
        files=[str(path) for path in group.tests],
        port_files=[str(path) for path in group.port_files],
        folder=str(group.folder),
        paths=[str(path) for path in (*group.paths, _SOURCE, content_dir("scripts"))],
        modules=[f"transformers.models.{name}.modeling_{name}" for name in group.families],
        scratch=str(scratch),
        seconds=options.seconds,
        job_seconds=min(options.job_seconds, options.seconds),
        memory_mb=options.memory_mb,
        workers=options.workers,
        most_bugs=options.most_bugs,
        jobs=list(options.jobs),
    )


def start_limited(module: str, spec: str, scratch: Path, seconds: float) -> tuple[str, str]:
    """Run a module of the limited kind on a spec; what it wrote (empty: nothing), and the last line that it said."""
    (scratch / "spec.json").write_text(spec, encoding="utf-8")
    result = scratch / "result.json"
    said = _start([sys.executable, "-m", module, str(scratch / "spec.json"), str(result)], scratch, seconds)
    return result.read_text(encoding="utf-8") if result.is_file() else "", said


def _start(command: list[str], scratch: Path, seconds: float) -> str:
    """Run the limited process; the last line of what it said. Everything that it started ends with it."""
    environment = {
        **{name: value for name, value in os.environ.items() if not _kept_back(name)},
        "PYTHONPATH": os.pathsep.join([str(_SOURCE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "NXD_CPU_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(scratch),
    }
    for name in ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC"):
        if name in os.environ:
            environment[name] = os.environ[name]
    log = scratch / "runner.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"no end after {seconds:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with {process.returncode} and without a word"


def _kept_back(name: str) -> bool:
    """Keys and tokens, and what would change how pytest or equiport work."""
    return name.startswith(("EQUIPORT_", "PYTEST_")) or any(word in name.upper() for word in _SECRET)


def add_dynamic(
    report: AuditReport,
    files: Iterable[Path],
    root: Path,
    options: DynamicOptions | None = None,
    *,
    extra: Sequence[Path] = (),
) -> AuditReport:
    """The report with the findings of the dynamic checks on its tests. `extra`: folders to import from.

    Nothing that lies in the audited folder is believed: what ran before runs again.
    """
    options = options or DynamicOptions()
    found: list[Finding] = []
    made: list[DynamicReport] = []
    chosen = groups(read_work(list(files), root), extra)
    for group, run in zip(chosen, run_groups(chosen, options), strict=True):
        found += findings_of(run, [path.name for path in group.tests], Places(group.folder, root))
        made.append(dynamic_report(run, group.key))
    return with_findings(report, found, made)


def with_findings(report: AuditReport, found: Iterable[Finding], made: Sequence[DynamicReport]) -> AuditReport:
    """The report with more findings, in its order, those of its suppressions let stand."""
    fresh = [item.model_copy(update={"suppressed": ""}) for item in dict.fromkeys(found)]
    judged, used = let_stand(fresh, report.suppressions)
    order = list(Severity)
    everything = [*report.findings, *judged]
    everything.sort(key=lambda item: (order.index(item.severity), item.file, item.line, item.rule))
    return report.model_copy(
        update={
            "findings": everything,
            "dynamic": list(made),
            "unused_suppressions": [item for item in report.unused_suppressions if item not in used],
        }
    )
