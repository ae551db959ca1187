"""One pytest session in a limited process: files are collected once, then each job runs them in a child of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from equiport.audit.dynamic import judges
from equiport.audit.dynamic.bugs import chosen_bugs, injector
from equiport.audit.dynamic.conditions import apply_condition
from equiport.audit.dynamic.contract import BASIC, SEEDS, SHAPES, JobResult, TestOutcome
from equiport.audit.dynamic.evidence import comparator_facts
from equiport.audit.dynamic.forks import Ended, Task, run_forked
from equiport.audit.dynamic.mutants import BugMutant, OutputMutant, RowMutant
from equiport.audit.dynamic.probe import Probe
from equiport.audit.dynamic.recorder import Recorder
from equiport.audit.dynamic.watch import Mode, Plain, Watch

Send = Callable[[dict[str, Any]], None]
Prepared = tuple[Mode, Callable[[], bool | set[str]]]
CONTROL, PROBE, COLLECT = "control", "probe", "collect"


@dataclass(frozen=True)
class Limits:
    """How many jobs side by side, how long one may take, when the last one may start, how many bugs are put in.

    `jobs`: which to run beside the control and the probe; empty: all.
    """

    workers: int
    job_seconds: float
    deadline: float
    most_bugs: int
    jobs: tuple[str, ...] = ()


class JobSession:
    """The pytest plugin of one session. `jobs`: what to run; None: the whole list, decided as it goes."""

    def __init__(
        self, watch: Watch, send: Send, limits: Limits, jobs: Sequence[str] | None, early: Prepared | None = None
    ) -> None:
        """`early`: the one job's mode, in force since before the files were imported."""
        self.watch, self.send, self.limits, self.jobs, self.early = watch, send, limits, jobs, early
        self.reports: list[pytest.TestReport] = []
        self.collected = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Files that cannot be collected are kept, with what they raise."""
        if report.failed:
            self.collected = _last_line(str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Kept until the job ends."""
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Each job in a child; nothing runs in this process itself."""
        if self.collected or not session.items:
            detail = self.collected or "no test was collected"
            self.send(JobResult(job=COLLECT, ended="died", detail=detail).model_dump())
            return True
        if self.jobs is not None:
            self._run(session, self.jobs)
            return True
        first = self._run(session, (CONTROL, PROBE))
        control = next((result for result in first if result.job == CONTROL), None)
        if control is None or not any(item.outcome == "passed" for item in control.tests.values()):
            return True
        bugs = next((result.bugs for result in first if result.job == PROBE), [])
        rest = [*BASIC, "row", "poison", SEEDS[0], *SHAPES, *(f"bug:{name}" for name in bugs)]
        wanted = self.limits.jobs
        again = self._run(session, [name for name in rest if not wanted or name in wanted])
        failed = [item for item in again if item.job == SEEDS[0] and not _passes(control, item)]
        if failed:
            self._run(session, SEEDS[1:])
        return True

    def _run(self, session: pytest.Session, jobs: Sequence[str]) -> list[JobResult]:
        tasks = [Task(job, partial(self._sent, session, job)) for job in jobs]
        limits = self.limits
        found = []
        for ended in run_forked(tasks, workers=limits.workers, seconds=limits.job_seconds, deadline=limits.deadline):
            found.append(result_of(ended))
            self.send(found[-1].model_dump())
        for job in jobs[len(found) :]:
            self.send({"left_out": job})
        return found

    def _sent(self, session: pytest.Session, job: str, send: Send) -> None:
        send(self._job(session, job))

    def _job(self, session: pytest.Session, job: str) -> dict[str, Any]:
        clock = time.monotonic()
        mode, applied = self.early or prepared(job, self.watch)
        before = judges.remember() if job == PROBE else {}
        if isinstance(mode, Probe):
            sys.setprofile(mode.outside)
        for place, item in enumerate(session.items):
            following = session.items[place + 1] if place + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sys.setprofile(None)
        if job == CONTROL and isinstance(mode, Recorder):
            mode.save()
        facts: list[tuple[str, str, str]] = []
        bugs: list[str] = []
        if isinstance(mode, Probe):
            facts = [*mode.facts, *comparator_facts(mode, judges.changed(before), _audited(session, self.watch))]
            bugs = chosen_bugs(mode.bugs, self.limits.most_bugs)
        where = applied()
        return JobResult(
            job=job, tests=_outcomes(self.reports, self.watch), facts=facts, bugs=bugs, applied=bool(where),
            applied_in=sorted(where) if isinstance(where, set) else [],
            port_raised=self.watch.port_raised, seconds=round(time.monotonic() - clock, 3),
        ).model_dump()  # fmt: skip


def prepared(job: str, watch: Watch) -> Prepared:
    """The mode of a job, put in force, and whether it found something to do."""
    if job in BASIC:
        output = OutputMutant(job)
        watch.mode = output
        return output, lambda: output.applied
    if job == "row":
        row = RowMutant()
        watch.mode = row
        return row, lambda: row.applied
    if job.startswith("bug:"):
        bug = BugMutant(injector(job.partition(":")[2]))
        watch.mode = bug
        return bug, lambda: bug.applied
    watch.mode = Probe() if job == PROBE else Plain()
    if job in (CONTROL, "text"):
        recorder = Recorder(Path(os.environ["TMPDIR"]) / "control.pt", compare=job == "text")
        watch.mode = recorder
        return recorder, lambda: True if job == CONTROL else recorder.differs()
    if job == PROBE:
        return watch.mode, lambda: True
    return watch.mode, apply_condition(job, watch)


def _audited(session: pytest.Session, watch: Watch) -> frozenset[str]:
    """The port's files and every Python file beside the tests."""
    folders = {Path(str(item.path)).parent for item in session.items}
    return watch.files | {os.path.realpath(file) for folder in folders for file in folder.glob("*.py")}


def _passes(control: JobResult, other: JobResult) -> bool:
    """Whether what passed in the control passes here too."""
    return all(
        name in other.tests and other.tests[name].outcome == "passed"
        for name, item in control.tests.items()
        if item.outcome == "passed"
    )


def _outcomes(reports: Sequence[pytest.TestReport], watch: Watch) -> dict[str, TestOutcome]:
    found: dict[str, TestOutcome] = {}
    for report in reports:
        name = report.nodeid
        said = "" if report.passed else _last_line(str(report.longrepr))
        outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
        before = found.get(name)
        if before is None or before.outcome == "passed":
            found[name] = TestOutcome(outcome=outcome, calls=watch.calls[name], detail=said)
    return found


def result_of(ended: Ended) -> JobResult:
    """A job's result; one that sent none says how its process ended."""
    name = ended.task.name
    for line in ended.lines:
        if line.get("job") == name and ended.how == "ok":
            return JobResult.model_validate(line)
    said = next((str(line["died"]) for line in ended.lines if "died" in line), "")
    return JobResult(job=name, ended=ended.how if ended.how != "ok" else "died", detail=said)


def _last_line(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = errors or [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:300]


def run_session(files: Sequence[str], folder: str, plugin: JobSession) -> None:
    """Collect the files with pytest and let the plugin run its jobs; pytest's own words go to the log."""
    os.chdir(folder)
    pytest.main(
        [*files, "-q", "-p", "no:cacheprovider", "-s", "--tb=short", "--rootdir", folder, "-c", os.devnull,
         "--import-mode=prepend"],
        plugins=[plugin],
    )  # fmt: skip
