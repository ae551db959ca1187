"""Runs every rule over every file."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from equiport import __version__
from equiport.audit import provenance
from equiport.audit.model import Hit, Rule, Severity
from equiport.audit.paraphrase import imported_families
from equiport.audit.registry import RULES
from equiport.audit.report import AuditReport, Finding, Suppression
from equiport.audit.rules import opaque
from equiport.audit.source import ParsedModule
from equiport.audit.work import Work, python_files, read_work
from equiport.errors import EquiportError


def audit_path(path: Path, suppressions: Sequence[Suppression] = ()) -> AuditReport:
    """Audit a file, or every Python file of a folder.

    Raises:
        EquiportError: no such path, or no Python file in it.
    """
    files = python_files(path)
    root = path if path.is_dir() else path.parent
    return audit_files(files, root, suppressions)


def audit_files(
    files: Sequence[Path], root: Path, suppressions: Sequence[Suppression] = (), families: Sequence[str] = ()
) -> AuditReport:
    """Audit files together: what one imports from another is followed. `root`: paths are shown relative to it.

    The installed files of transformers that the audited ones import, and those of `families`, must be the originals.

    Raises:
        EquiportError: the list is empty: nothing audited is never clean.
    """
    if not files:
        raise EquiportError("nothing to audit", where=root, remedy="Give the files of a port or of its tests.")
    clock = time.monotonic()
    before = {_shown(file, root): _digest(file) for file in files}
    work = read_work(files, root)
    found = list(dict.fromkeys(finding for module in work.modules for finding in _of_module(module, work)))
    found += _of_source(sorted({*families, *imported_families(work.modules)}))
    found, used = let_stand(found, suppressions)
    order = list(Severity)
    found.sort(key=lambda item: (order.index(item.severity), item.file, item.line, item.rule))
    return AuditReport(
        tool_version=__version__,
        root=str(root),
        rules=[rule.id for rule in (*RULES, provenance.RULE)],
        files=before,
        findings=found,
        suppressions=list(suppressions),
        unused_suppressions=[item for item in suppressions if item not in used],
        seconds=round(time.monotonic() - clock, 3),
    )


def _of_module(module: ParsedModule, work: Work) -> Iterator[Finding]:
    if module.opaque:
        yield _finding(opaque.RULE, Hit(1, module.opaque), module, work)
        return
    for rule in RULES:
        try:
            for hit in rule.check(module):
                yield _finding(rule, hit, module, work)
        except RecursionError:
            yield _finding(opaque.RULE, Hit(1, f"is too tangled for rule {rule.id}"), module, work)
    if module.flow.exhausted:
        yield _finding(opaque.RULE, Hit(1, "is too tangled for its data flow to be followed"), module, work)


def _of_source(families: Sequence[str]) -> list[Finding]:
    rule = provenance.RULE
    return [
        Finding(
            rule=rule.id,
            severity=rule.severity if item.known else Severity.NOTE,
            file=item.file,
            line=1,
            quoted="",
            message=item.fault,
            why=rule.why,
            remedy=rule.remedy,
        )
        for item in provenance.check_provenance(families)
        if item.fault
    ]


def _finding(rule: Rule, hit: Hit, module: ParsedModule, work: Work) -> Finding:
    return Finding(
        rule=rule.id,
        severity=hit.severity or rule.severity,
        file=_shown(module.path, work.root),
        line=hit.line,
        quoted=module.line(hit.line),
        message=hit.message,
        why=rule.why,
        remedy=rule.remedy,
    )


def let_stand(found: Sequence[Finding], suppressions: Sequence[Suppression]) -> tuple[list[Finding], set[Suppression]]:
    """The findings, those that a suppression names with its reason; and the suppressions that did."""
    used: set[Suppression] = set()
    return [_suppressed(finding, suppressions, used) for finding in found], used


def _suppressed(finding: Finding, suppressions: Sequence[Suppression], used: set[Suppression]) -> Finding:
    for item in suppressions:
        place = finding.file == item.file or finding.file.endswith("/" + item.file)
        if item.rule == finding.rule and place and item.quoted.strip() in ("", finding.quoted):
            used.add(item)
            return finding.model_copy(update={"suppressed": item.reason})
    return finding


def _shown(file: Path, root: Path) -> str:
    absolute, base = file.absolute(), root.absolute()
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) else str(absolute)


def _digest(file: Path) -> str:
    # what cannot be read is a finding, not an error
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
