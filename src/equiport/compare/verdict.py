"""Verdicts and the machine-readable reasons behind them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """What a gate, a stage or an experiment says. Nothing missing, empty, skipped or stale is ever a PASS."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class Reason:
    """Why a verdict was given: a code for machines, a message for people, the subject it speaks of."""

    code: str
    message: str
    subject: str = ""


def combine(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts: FAIL, then INCONCLUSIVE, then NOT RUN, then PASS; an empty list is NOT RUN."""
    seen = list(verdicts)
    for worst in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.NOT_RUN, Verdict.PASS):
        if worst in seen:
            return worst
    return Verdict.NOT_RUN
