"""Whether a port and its tests mean something: static rules over their source, which is never imported."""

from equiport.audit.engine import audit_files, audit_path
from equiport.audit.model import Role, Severity
from equiport.audit.registry import RULES
from equiport.audit.report import AuditReport, Finding, Suppression, load_report, load_suppressions

__all__ = [
    "RULES",
    "AuditReport",
    "Finding",
    "Role",
    "Severity",
    "Suppression",
    "audit_files",
    "audit_path",
    "load_report",
    "load_suppressions",
]
