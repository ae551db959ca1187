"""The report of an experiment: completion gate, Markdown and HTML, verification."""

from equiport.report.build import WrittenReport, write_report
from equiport.report.completion import Completion, completion, loosened, patches_in_force
from equiport.report.verify import Verification, verify_report

__all__ = [
    "Completion",
    "Verification",
    "WrittenReport",
    "completion",
    "loosened",
    "patches_in_force",
    "verify_report",
    "write_report",
]
