"""Errors a user can act on: one line that names the file, the field and the remedy.

Every expected failure of equiport is an `EquiportError`. The command line prints it as one line and exits with
`exit_code`; a traceback is shown only under --debug.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of every script and command."""

    PASS = 0
    FAIL = 1
    BAD_INPUT = 2
    INCONCLUSIVE = 3
    PREREQUISITE = 4


class EquiportError(Exception):
    """Bad input: says what is wrong, where, and what to do.

    `what` is the fault, `where` the file (or flag) that holds it, `field` the key inside it, `remedy` the way on.
    """

    exit_code: ExitCode = ExitCode.BAD_INPUT

    def __init__(self, what: str, *, where: str | Path = "", field: str = "", remedy: str = "") -> None:
        self.what, self.where, self.field, self.remedy = what, str(where), field, remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The error as one line: `where: field: what. Remedy`."""
        head = ": ".join(part for part in (self.where, self.field) if part)
        text = f"{head}: {self.what}" if head else self.what
        text = text.rstrip(".")
        line = f"{text}. {self.remedy}" if self.remedy else text
        return " ".join(line.split())


class PrerequisiteError(EquiportError):
    """A stage that this one needs is missing or stale."""

    exit_code = ExitCode.PREREQUISITE


class OpenQuestionError(EquiportError):
    """Something has to be asked, not guessed."""

    exit_code = ExitCode.INCONCLUSIVE
