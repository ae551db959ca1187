"""The audit of an experiment: its port, its tests and its patches, judged together and always anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equiport.audit.dynamic.launch import with_findings
from equiport.audit.dynamic.port_launch import Part, key_of, read_store
from equiport.audit.engine import audit_files
from equiport.audit.model import Severity
from equiport.audit.render import PAGE_NAME, page
from equiport.audit.report import AUDIT_NAME, AuditReport, Finding, Suppression, load_report, load_suppressions
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import write_text
from equiport.experiment.hashing import port_files
from equiport.fixtures.folder import read_config

SUPPRESSIONS_NAME = "audit_suppressions.json"


def audit_experiment(experiment: Experiment, *, patched: bool = False) -> AuditReport:
    """Audit the port's files and every Python file of tests/ and patches/, and add what ran on the same content.

    A stored static audit is never believed: this costs less than a second and cannot be stale. What ran is believed as
    long as the files, the toolkit's version and whether patches are in force are what they were.

    Raises:
        EquiportError: audit_suppressions.json is damaged.
    """
    files = [*port_files(experiment.config.target_modeling_file)]
    for folder in (experiment.tests, experiment.patches):
        files += sorted(folder.rglob("*.py"))
    found = audit_files(
        list(dict.fromkeys(path for path in files if path.is_file())),
        experiment.root,
        suppressions_of(experiment),
        (str(read_config(experiment.config.source_model_path).get("model_type", "")),),
    )
    parts = [part for part in fresh_parts(experiment, patched=patched).values() if part is not None]
    return with_findings(found, [item for part in parts for item in part.findings], [part.report for part in parts])


def suppressions_of(experiment: Experiment) -> Sequence[Suppression]:
    """What the experiment's suppressions file lets stand.

    Raises:
        EquiportError: it is damaged.
    """
    given = experiment.root / SUPPRESSIONS_NAME
    return load_suppressions(given) if given.is_file() else ()


def fresh_parts(experiment: Experiment, *, patched: bool) -> dict[str, Part | None]:
    """What ran on the files as they are: of the tests, and of the port. None: nothing, or on others."""
    store = read_store(experiment)
    return {
        name: part if part is not None and part.report.key == key_of(experiment, name, patched) else None
        for name, part in (("tests", store.tests), ("port", store.port))
    }


def write_audit(experiment: Experiment, found: AuditReport) -> Path:
    """Write results/audit.json and AUDIT.md; returns the first."""
    write_text(experiment.root / PAGE_NAME, page(found))
    return found.save(experiment.results / AUDIT_NAME)


def changed_since(experiment: Experiment, now: AuditReport) -> list[str]:
    """What the stored audit.json says otherwise than an audit of the files as they are now."""
    path = experiment.results / AUDIT_NAME
    if not path.is_file():
        return ["audit.json is gone"]
    try:
        then = load_report(path)
    except EquiportError as error:
        return [error.line()]
    names = sorted({*then.files, *now.files})
    changed = [name for name in names if then.files.get(name) != now.files.get(name)]
    if not changed and (then.rules, then.findings) != (now.rules, now.findings):
        return ["audit.json: findings differ from those of an audit of the same files"]
    return [f"audit: {', '.join(changed)} changed"] if changed else []


def refusals(tests: Path, port: Path | None, root: Path) -> list[Finding]:
    """Errors in a folder of component tests, for which its files are refused."""
    own = sorted(tests.glob("*.py"))
    if not own:
        return []
    beside = port_files(port) if port is not None and port.is_file() else []
    given = root / SUPPRESSIONS_NAME
    found = audit_files([*own, *beside], tests, load_suppressions(given) if given.is_file() else ())
    names = {path.name for path in own}
    return [item for item in found.counting if item.severity is Severity.ERROR and item.file in names]
