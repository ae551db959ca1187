"""The run-time checks of one unit's test, for whoever runs that test."""

from __future__ import annotations

from pathlib import Path

from equiport.audit.dynamic.contract import RunResult
from equiport.audit.dynamic.findings import Places, dynamic_report, findings_of
from equiport.audit.dynamic.launch import DynamicOptions, Group, groups, run_groups, with_findings
from equiport.audit.render import PAGE_NAME, mutation_line, page
from equiport.audit.report import AUDIT_NAME, AuditReport, load_report
from equiport.audit.work import read_work
from equiport.experiment.atomic import write_text

#: Seconds for one unit; what does not fit is named in its AUDIT.md.
UNIT_OPTIONS = DynamicOptions(seconds=180.0, job_seconds=90.0, most_bugs=4)


def run_unit_checks(units: Path, unit: str, file: str, options: DynamicOptions = UNIT_OPTIONS) -> RunResult:
    """Run a unit's test file with wrong ports and under other conditions, in limited processes."""
    group = _group(units, unit, file)
    return run_groups([group], options)[0] if group is not None else RunResult()


def judge_unit(units: Path, unit: str, file: str, run: RunResult) -> AuditReport:
    """Add what the run says to the unit's audit.json and AUDIT.md; returns the whole audit.

    Raises:
        EquiportError: the unit's audit.json is missing or damaged.
    """
    folder = units / unit
    group = _group(units, unit, file)
    found = load_report(folder / AUDIT_NAME)
    key = group.key if group is not None else ""
    found = with_findings(found, findings_of(run, [file], Places(folder.absolute(), units)), [dynamic_report(run, key)])
    found.save(folder / AUDIT_NAME)
    write_text(folder / PAGE_NAME, page(found))
    return found


def first_fault(found: AuditReport) -> str:
    """The first finding that counts, on one line; empty when the audit is clean."""
    if found.clean:
        return ""
    first = found.counting[0]
    return f"{first.rule} at {first.file}:{first.line}: {first.message} ({mutation_line(found)})"


def _group(units: Path, unit: str, file: str) -> Group | None:
    folder = units / unit
    work = read_work([*sorted(folder.rglob("*.py")), *sorted(units.glob("*.py"))], units)
    for found in groups(work):
        tests = tuple(path for path in found.tests if path.name == file and path.parent == folder.absolute())
        if tests:
            return Group(found.folder, tests, found.port_files, found.paths, found.families, found.others)
    return None
