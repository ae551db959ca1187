"""AUDIT.md and the terminal's table."""

from __future__ import annotations

from equiport.audit import provenance
from equiport.audit.dynamic.rules import DYNAMIC_RULES
from equiport.audit.registry import RULES
from equiport.audit.report import AuditReport, DynamicReport, Finding
from equiport.errors import EquiportError

_ALL = (*RULES, provenance.RULE)
_EXPLAINED = (*_ALL, *DYNAMIC_RULES)
_STATIC = (
    "Rules over source text alone: nothing was run. `equiport audit PATH --dynamic` tries whether the tests notice a "
    "wrong port."
)
PAGE_NAME = "AUDIT.md"


def headline(report: AuditReport) -> str:
    """One line: clean or not, how many rules over how many files, what was let stand."""
    counting = report.counting
    errors = sum(item.severity.value == "error" for item in counting)
    what = "clean" if report.clean else f"{errors} errors, {len(counting) - errors} warnings"
    parts = [f"{len(report.rules)} rules", f"{len(report.files)} files"]
    parts += [f"{len(report.notes)} notes"] if report.notes else []
    parts += [f"{len(report.suppressed)} suppressed"] if report.suppressed else []
    parts += [mutation_line(report)] if report.dynamic else []
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
    lines += ["", "## What ran", "", *_ran(report)]
    lines += ["## Files", "", "| file | sha256 |", "|---|---|"]
    lines += [f"| {name} | {digest} |" for name, digest in report.files.items()]
    return "\n".join(lines) + "\n"


def mutation_line(report: AuditReport) -> str:
    """How many wrong ports the tests noticed, over everything that ran."""
    killed, total = sum(item.killed for item in report.dynamic), sum(item.total for item in report.dynamic)
    return f"{killed} of {total} wrong ports noticed" if total else "no wrong port could be tried"


def _ran(report: AuditReport) -> list[str]:
    if not report.dynamic:
        return [_STATIC, ""]
    lines = [line for item in report.dynamic for line in _run(item)]
    return [*lines, "| rule | severity | what it finds |", "|---|---|---|", *(
        f"| {rule.id} | {rule.severity.value} | {rule.title} |" for rule in DYNAMIC_RULES
    ), ""]  # fmt: skip


def _run(item: DynamicReport) -> list[str]:
    score = f"{item.killed / item.total:.0%}" if item.total else "none could be tried"
    lines = [
        f"{item.subjects} of {item.tests} tests pass and run the port. Mutation score {score} "
        f"({item.killed} of {item.total}), unchanged ports failed: 0. Network: {item.network or 'not cut off'}. "
        f"{item.seconds:.1f} s.",
        "",
        f"Checks that came to their end: {', '.join(item.checks) or 'none'}.",
        "",
    ]
    lines += [f"Left out, for want of time: {', '.join(item.left_out)}.", ""] if item.left_out else []
    if item.mutants:
        lines += ["| wrong port | noticed by | of |", "|---|---|---|"]
        lines += [f"| {row.mutant} | {row.killed} | {row.total} |" for row in item.mutants] + [""]
    return lines


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
    for rule in _EXPLAINED:
        if rule.id == rule_id:
            parts = [f"{rule.id} ({rule.severity.value}): {rule.title}", f"why: {rule.why}", f"do:  {rule.remedy}"]
            parts += [line for item in rule.bad[:1] for line in (f"finds ({item.file}):", _indented(item.code))]
            parts += [line for item in rule.good[:1] for line in (f"leaves alone ({item.file}):", _indented(item.code))]
            return "\n".join(parts)
    known = ", ".join(rule.id for rule in _EXPLAINED)
    raise EquiportError(f"no rule {rule_id!r}", field="--explain", remedy=f"Rules: {known}.")


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in code.strip("\n").splitlines())
