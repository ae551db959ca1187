"""What the jobs of a run say: which mutants lived, the score, and findings."""

from __future__ import annotations

from collections.abc import Sequence

from equiport.audit.dynamic.contract import BASIC, SEEDS, SHAPES, JobResult, TestOutcome

_MUTANTS = (*BASIC, "row")
_BUGS = ("bug:", "text:")


def job(jobs: Sequence[JobResult], name: str) -> JobResult | None:
    """The job of this name that came to its end."""
    return next((item for item in jobs if item.job == name and item.ended == "ok"), None)


def subjects(jobs: Sequence[JobResult]) -> dict[str, TestOutcome]:
    """Tests that pass unchanged and run the port."""
    control = job(jobs, "control")
    tests = control.tests if control is not None else {}
    return {name: item for name, item in tests.items() if item.outcome == "passed" and item.calls}


def is_mutant(name: str) -> bool:
    """Whether a job makes the port wrong."""
    return name in _MUTANTS or name.startswith(_BUGS)


def touches(result: JobResult, test: str) -> bool:
    """Whether the port was wrong in this test; where the process broke, nothing else is known."""
    return test in result.applied_in if result.ended == "ok" else True


def lives(result: JobResult, test: str) -> bool:
    """Whether a test passes although the port is wrong in it."""
    found = result.tests.get(test)
    return touches(result, test) and found is not None and found.outcome == "passed"


def survivors(jobs: Sequence[JobResult]) -> list[str]:
    """Basic mutants that a test lets live."""
    tests = subjects(jobs)
    found = [item for item in jobs if item.ended == "ok" and item.job in _MUTANTS]
    return [item.job for item in found if any(lives(item, test) for test in tests)]


def attempts_failed(jobs: Sequence[JobResult], names: Sequence[str]) -> list[str]:
    """Tests that pass unchanged and fail in every one of these jobs that ran and had something to change."""
    ran = [item for name in names if (item := job(jobs, name)) is not None and item.applied]
    if not ran:
        return []
    tests = subjects(jobs)
    return [test for test in tests if all(not _passed(item, test) for item in ran)]


def once_failed(jobs: Sequence[JobResult], names: Sequence[str]) -> list[str]:
    """Tests that fail in some of these jobs and pass in another."""
    ran = [item for name in names if (item := job(jobs, name)) is not None and item.applied]
    return [test for test in subjects(jobs) if len({_passed(item, test) for item in ran}) == 2]


def _passed(result: JobResult, test: str) -> bool:
    found = result.tests.get(test)
    return found is not None and found.outcome == "passed"


__all__ = ["BASIC", "SEEDS", "SHAPES", "attempts_failed", "is_mutant", "job", "lives", "once_failed", "subjects",
           "survivors", "touches"]  # fmt: skip
