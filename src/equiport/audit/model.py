"""What a rule is, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equiport.audit.source import ParsedModule


class Severity(str, Enum):
    """error and warning forbid a clean audit; a note is shown and forbids nothing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Role(str, Enum):
    """What a file is for: some constructs are cheating in one and ordinary in another."""

    PORT = "port"
    TEST = "test"
    PATCH = "patch"
    SUPPORT = "support"


@dataclass(frozen=True)
class Hit:
    """One place that a rule points at. `severity` overrides the rule's own where the file's role softens it."""

    node: ast.AST | int
    message: str
    severity: Severity | None = None

    @property
    def line(self) -> int:
        """1-based line number."""
        return self.node if isinstance(self.node, int) else int(getattr(self.node, "lineno", 1))


@dataclass(frozen=True)
class Sample:
    """A small source that a rule must find, or must leave alone; `beside` are other files of its folder."""

    code: str
    file: str = "test_block.py"
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One rule: `check` yields what it finds in one parsed file; `bad` and `good` are its own samples."""

    id: str
    severity: Severity
    title: str
    why: str
    remedy: str
    check: Callable[[ParsedModule], Iterable[Hit]]
    bad: tuple[Sample, ...]
    good: tuple[Sample, ...]
