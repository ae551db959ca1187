"""A pytest plugin (`-p equiport.stages.pytest_evidence`): one JSON line an outcome, written to EQUIPORT_OUTCOMES."""

from __future__ import annotations

import json
import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write call outcomes, and setup or teardown outcomes that are not plain passes."""
    path = os.environ.get("EQUIPORT_OUTCOMES")
    if not path or (report.when != "call" and report.passed):
        return
    outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
    detail = "" if report.passed else _last_line(str(report.longrepr))
    line = {"test": report.nodeid, "when": report.when, "outcome": outcome, "detail": detail}
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def _last_line(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = errors or [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:400]
