"""A pytest plugin (`-p equiport.stages.pytest_evidence`): one JSON line a fact, where EQUIPORT_OUTCOMES says.

`collected`: the tests of the file; `test`: an outcome; `finished`: pytest came to its end; `tampered`: code other than
the comparator's opened the file of records, or other than this plugin's the file of outcomes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

_OUTCOMES = os.environ.get("EQUIPORT_OUTCOMES", "")
_OWNERS = {
    os.path.basename(_OUTCOMES): os.path.join("stages", "pytest_evidence.py"),
    os.path.basename(os.environ.get("EQUIPORT_RECORDS", "")): os.path.join("compare", "records.py"),
}
_OWNERS.pop("", None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write what will run, so that a test that ends the process is missed."""
    _write({"collected": [item.nodeid for item in session.items]})


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write call outcomes, and setup or teardown outcomes that are not plain passes."""
    if report.when != "call" and report.passed:
        return
    outcome = "xfail" if hasattr(report, "wasxfail") else report.outcome
    detail = "" if report.passed else _last_line(str(report.longrepr))
    _write({"test": report.nodeid, "when": report.when, "outcome": outcome, "detail": detail})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """Write that pytest came to its end."""
    _write({"finished": int(exitstatus)})


def _write(fact: dict[str, Any]) -> None:
    if _OUTCOMES:
        with open(_OUTCOMES, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(fact) + "\n")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: who opens the files that the verdict is read from?"""
    if event != "open" or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    owner = _OWNERS.get(os.path.basename(os.fsdecode(arguments[0])))
    if owner is None:
        return
    frame = sys._getframe(1)
    if not frame.f_code.co_filename.endswith(owner):
        _write({"tampered": f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"})


if _OUTCOMES:
    sys.addaudithook(_watch)


def _last_line(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = errors or [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "")[:400]
