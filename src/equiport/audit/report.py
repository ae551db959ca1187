"""audit.json: what was audited, by which rules, and what was found."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport.audit.model import Severity
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json

SCHEMA_VERSION = 1
AUDIT_NAME = "audit.json"


class Finding(BaseModel):
    """One finding. `file` is relative to the audited root where it lies inside."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str
    severity: Severity
    file: str
    line: int
    quoted: str
    message: str
    why: str
    remedy: str
    suppressed: str = Field(default="", description="the reason given for letting it stand; empty: it counts")

    @property
    def counts(self) -> bool:
        """Whether it forbids a clean audit."""
        return not self.suppressed and self.severity is not Severity.NOTE


class Suppression(BaseModel):
    """One finding that somebody lets stand. `file` is a name or the end of a path; `quoted`: only on this line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str = Field(min_length=1)
    file: str = Field(min_length=1)
    quoted: str = ""
    reason: str = Field(min_length=10)


class MutantRow(BaseModel):
    """One way to make the port wrong: of `total` tests that run the port, how many fail then."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mutant: str
    killed: int
    total: int


class DynamicReport(BaseModel):
    """What ran, in limited processes. `key`: sha256 over the files and versions that it holds for.

    `checks`: the jobs that came to their end; `subjects`: tests that pass and run the port, of `tests`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    network: str = ""
    checks: list[str] = Field(default_factory=list)
    tests: int = 0
    subjects: int = 0
    mutants: list[MutantRow] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def killed(self) -> int:
        """Pairs of a test and a wrong port that it notices."""
        return sum(row.killed for row in self.mutants)

    @property
    def total(self) -> int:
        """All pairs of a test and a wrong port."""
        return sum(row.total for row in self.mutants)


class AuditReport(BaseModel):
    """The whole of one audit. `files` maps each audited file to its sha256."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    tool_version: str
    root: str
    rules: list[str]
    files: dict[str, str]
    findings: list[Finding]
    suppressions: list[Suppression] = Field(default_factory=list)
    unused_suppressions: list[Suppression] = Field(default_factory=list)
    dynamic: list[DynamicReport] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def counting(self) -> list[Finding]:
        """Errors and warnings that are not suppressed."""
        return [finding for finding in self.findings if finding.counts]

    @property
    def clean(self) -> bool:
        """No error and no warning, over at least one file and one rule."""
        return bool(self.files and self.rules) and not self.counting

    @property
    def notes(self) -> list[Finding]:
        """Findings of severity note."""
        return [finding for finding in self.findings if finding.severity is Severity.NOTE and not finding.suppressed]

    @property
    def suppressed(self) -> list[Finding]:
        """Findings that a suppression lets stand."""
        return [finding for finding in self.findings if finding.suppressed]

    def save(self, path: Path) -> Path:
        """Write audit.json atomically."""
        return write_json(path, self)


def load_report(path: Path) -> AuditReport:
    """Read audit.json.

    Raises:
        EquiportError: missing, no JSON, or not of this schema.
    """
    remedy = "Run the audit again."
    raw = read_json(path, remedy=remedy)
    try:
        return AuditReport.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(f"is no audit: {first['msg']}", where=path, field=field, remedy=remedy) from None


def load_suppressions(path: Path) -> list[Suppression]:
    """Read a suppressions file: `{"suppressions": [{"rule", "file", "reason", "quoted"?}]}`.

    Raises:
        EquiportError: missing, no JSON, an unknown field, or a reason of fewer than ten letters.
    """
    remedy = 'Write {"suppressions": [{"rule": "...", "file": "...", "reason": "..."}]}.'
    raw = read_json(path, remedy=remedy)
    items = raw.get("suppressions") if isinstance(raw, dict) else None
    if not isinstance(items, list):
        raise EquiportError("is no suppressions file", where=path, field="suppressions", remedy=remedy)
    try:
        return [Suppression.model_validate(item) for item in items]
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy=remedy) from None
