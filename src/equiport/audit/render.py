"""AUDIT.md and the terminal's table."""

from __future__ import annotations

from equiport.audit import provenance
from equiport.audit.registry import RULES
from equiport.audit.report import AuditReport, Finding
from equiport.errors import EquiportError

_ALL = (*RULES, provenance.RULE)
PAGE_NAME = "AUDIT.md"


def headline(report: AuditReport) -> str:
    """One line: clean or not, how many rules over how many files, what was let stand."""
    counting = report.counting
    errors = sum(item.severity.value == "error" for item in counting)
    what = "clean" if report.clean else f"{errors} errors, {len(counting) - errors} warnings"
    parts = [f"{len(report.rules)} rules", f"{len(report.files)} files"]
    parts += [f"{len(report.notes)} notes"] if report.notes else []
    parts += [f"{len(report.suppressed)} suppressed"] if report.suppressed else []
    return f"audit: {what} ({', '.join(parts)})"


def table(report: AuditReport, *, notes: bool = True) -> str:
    """Findings as lines for a terminal."""
    lines = []
    for item in report.findings:
        if item.suppressed or (not item.counts and not notes):
            continue
        lines += [f"{item.severity.value:<8}{item.rule:<24}{item.file}:{item.line}", f"        {item.message}"]
        lines += [f"        > {item.quoted}"] if item.quoted else []
        lines += [f"        why: {item.why}", f"        do:  {item.remedy}"] if item.counts else []
    return "\n".join([*lines, headline(report)])


def page(report: AuditReport) -> str:
    """AUDIT.md."""
    lines = ["# Audit", "", f"**{headline(report)}**", ""]
    for title, items in (
        ("Findings", report.counting), ("Notes", report.notes), ("Let stand by a suppression", report.suppressed),
    ):  # fmt: skip
        lines += [f"## {title}", ""]
        lines += [line for item in items for line in _entry(item)] if items else ["None.", ""]
    if report.unused_suppressions:
        lines += ["## Suppressions that match nothing", ""]
        lines += [f"- `{item.rule}` {item.file}: {item.reason}" for item in report.unused_suppressions] + [""]
    lines += ["## Rules that ran", "", "| rule | severity | what it finds |", "|---|---|---|"]
    lines += [f"| {rule.id} | {rule.severity.value} | {rule.title} |" for rule in _ALL if rule.id in report.rules]
    lines += ["", "Rules over source text: what a port does at run time is not part of this audit.", ""]
    lines += ["## Files", "", "| file | sha256 |", "|---|---|"]
    lines += [f"| {name} | {digest} |" for name, digest in report.files.items()]
    return "\n".join(lines) + "\n"


def _entry(item: Finding) -> list[str]:
    lines = [f"- **{item.severity.value}** `{item.rule}` {item.file}:{item.line}: {item.message}"]
    lines += [f"  - `{item.quoted.replace('`', chr(39))}`"] if item.quoted else []
    lines += (
        [f"  - let stand: {item.suppressed}"] if item.suppressed else [f"  - why: {item.why}", f"  - do: {item.remedy}"]
    )
    return [*lines, ""]


def explain(rule_id: str) -> str:
    """What a rule is for, with a sample that it finds and one that it leaves alone.

    Raises:
        EquiportError: no such rule.
    """
    for rule in _ALL:
        if rule.id == rule_id:
            parts = [f"{rule.id} ({rule.severity.value}): {rule.title}", f"why: {rule.why}", f"do:  {rule.remedy}"]
            parts += [line for item in rule.bad[:1] for line in (f"finds ({item.file}):", _indented(item.code))]
            parts += [line for item in rule.good[:1] for line in (f"leaves alone ({item.file}):", _indented(item.code))]
            return "\n".join(parts)
    known = ", ".join(rule.id for rule in _ALL)
    raise EquiportError(f"no rule {rule_id!r}", field="--explain", remedy=f"Rules: {known}.")


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in code.strip("\n").splitlines())
