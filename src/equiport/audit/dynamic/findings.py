"""From the jobs of a run to findings, and to the figures that the report prints."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from equiport.audit.dynamic import judging, rules
from equiport.audit.dynamic.contract import BASIC, SEEDS, SHAPES, JobResult, RunResult
from equiport.audit.model import Role, Rule, Severity
from equiport.audit.report import DynamicReport, Finding, MutantRow
from equiport.audit.source import parse

SCORE = 0.9
_SAID = {
    "noise": "noise in place of the port's output", "zeros": "zeros in place of the port's output",
    "constant": "a constant in place of the port's output", "scaled": "1.01 times the port's output",
}  # fmt: skip
_BY_ID = {rule.id: rule for rule in rules.DYNAMIC_RULES}


class Places:
    """Where the tests of a folder stand."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self._lines: dict[str, dict[str, tuple[int, str]]] = {}

    def finding(self, rule: Rule, test: str, message: str, severity: Severity | None = None) -> Finding:
        """A finding at a test, or at the folder's file when no test is named."""
        file, _, name = test.partition("::")
        line, quoted = self._in(file).get(name.rpartition("::")[2].partition("[")[0], (1, "")) if file else (1, "")
        path = (self.folder / file).absolute()
        shown = str(path.relative_to(self.root.absolute())) if path.is_relative_to(self.root.absolute()) else str(path)
        return Finding(
            rule=rule.id, severity=severity or rule.severity, file=shown, line=line, quoted=quoted, message=message,
            why=rule.why, remedy=rule.remedy,
        )  # fmt: skip

    def _in(self, file: str) -> dict[str, tuple[int, str]]:
        if file not in self._lines:
            module = parse(self.folder / file, Role.TEST)
            self._lines[file] = {
                node.name: (node.lineno, module.line(node.lineno))
                for node in ast.walk(module.tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
        return self._lines[file]


def findings_of(run: RunResult, files: Sequence[str], places: Places) -> list[Finding]:
    """Everything that the run says against its tests and their port; `files`: the test files by name."""
    jobs = run.jobs
    broken = [item for item in jobs if item.ended != "ok" and not judging.is_mutant(item.job)]
    found = [
        places.finding(
            rules.TEST_NOT_RUN if item.job in ("collect", "control") else rules.RUN_BROKEN,
            files[0],
            f"{item.job}: {item.detail or item.ended}",
            None if item.job in ("collect", "control", "probe") else Severity.NOTE,
        )
        for item in broken
    ]
    lost = [name for name in ("probe", *BASIC) if name in run.left_out]
    if lost:
        found.append(places.finding(rules.RUN_BROKEN, files[0], f"no time was left for {', '.join(lost)}"))
    control = judging.job(jobs, "control")
    if control is None:
        said = "no job came to its end" if not jobs else ""
        return found or [places.finding(rules.RUN_BROKEN, files[0], said or "the control did not run")]
    for test, outcome in control.tests.items():
        if outcome.outcome != "passed":
            found.append(places.finding(rules.TEST_NOT_RUN, test, f"{outcome.outcome}: {outcome.detail}"))
    subjects = judging.subjects(jobs)
    quiet = [name for name in files if not any(test.startswith(name) for test in subjects)]
    passing = {test.partition("::")[0] for test, outcome in control.tests.items() if outcome.outcome == "passed"}
    found += [
        places.finding(rules.PORT_NOT_RUN, name, "its tests pass and no result of the port reaches any of them",
                       None if len(quiet) == len(files) else Severity.WARNING)
        for name in quiet if name in passing
    ]  # fmt: skip
    found += _mutants(jobs, places, subjects)
    found += _conditions(jobs, places)
    for item in jobs:
        for rule, test, said in item.facts:
            found.append(places.finding(_BY_ID[rule], test or files[0], said))
    return found


def _mutants(jobs: Sequence[JobResult], places: Places, subjects: Iterable[str]) -> list[Finding]:
    found = []
    for name in BASIC:
        result = judging.job(jobs, name)
        for test in subjects if result is not None else ():
            if result is not None and judging.lives(result, test):
                found.append(places.finding(rules.MUTANT_LIVES, test, f"passes with {_SAID[name]}"))
    rows = mutant_rows(jobs)
    killed, total = sum(row.killed for row in rows), sum(row.total for row in rows)
    if total and killed / total < SCORE:
        lived = [row.mutant for row in rows if row.killed < row.total]
        said = f"{killed} of {total} wrong ports are noticed, not {', '.join(lived[:4])}"
        found.append(places.finding(rules.SCORE_LOW, next(iter(subjects)), said))
    return found


def _conditions(jobs: Sequence[JobResult], places: Places) -> list[Finding]:
    found = []
    for names, rule, what in (
        (("poison",), rules.READS_UNINITIALISED, "fresh memory is full of NaN"),
        (SEEDS, rules.SEED_BOUND, "seeds are others"),
        (SHAPES, rules.SHAPE_BOUND, "inputs have other shapes"),
    ):
        raised = [item for name in names if (item := judging.job(jobs, name)) and item.port_raised]
        for test in judging.attempts_failed(jobs, names):
            detail = next((item.tests[test].detail for name in names
                           if (item := judging.job(jobs, name)) and test in item.tests), "")  # fmt: skip
            soft = Severity.NOTE if rule is rules.SHAPE_BOUND and raised else None
            found.append(places.finding(rule, test, f"fails when {what}: {detail}", soft))
        for test in judging.once_failed(jobs, names):
            found.append(places.finding(rule, test, f"fails in some runs when {what}", Severity.NOTE))
    return found


def mutant_rows(jobs: Sequence[JobResult]) -> list[MutantRow]:
    """A row for each mutant that changed something: of the tests that run the port, how many notice it."""
    rows = []
    for item in jobs:
        if judging.is_mutant(item.job):
            tests = [test for test in judging.subjects(jobs) if judging.touches(item, test)]
            # a wrong port that breaks or hangs the tests is noticed too
            killed = sum(not judging.lives(item, test) for test in tests) if item.ended == "ok" else len(tests)
            if tests:
                rows.append(MutantRow(mutant=item.job, killed=killed, total=len(tests)))
    return rows


def dynamic_report(run: RunResult, key: str) -> DynamicReport:
    """The figures of a run."""
    control = judging.job(run.jobs, "control")
    return DynamicReport(
        key=key,
        network=run.network,
        checks=[item.job for item in run.jobs if item.ended == "ok" and not judging.is_mutant(item.job)],
        tests=len(control.tests) if control else 0,
        subjects=len(judging.subjects(run.jobs)),
        mutants=mutant_rows(run.jobs),
        left_out=run.left_out,
        seconds=run.seconds,
    )
