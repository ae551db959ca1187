"""Run component test files, each in a process of its own, and collect what the comparator recorded."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from equiport.compare.reasons import ReasonCode
from equiport.compare.records import RECORDS_ENV, Record, read_records
from equiport.compare.verdict import Reason
from equiport.errors import EquiportError
from equiport.stages.component_check import THRESHOLDS_ENV
from equiport.warm import FOR_TESTS, warm_server

_WORKERS = 2
_POLL = 0.5


@dataclass(frozen=True)
class FileEvidence:
    """What one test file left: records, tests run, and everything that forbids to believe it."""

    file: str
    records: tuple[Record, ...]
    tests: int
    reasons: tuple[Reason, ...]
    output: str


def collect_evidence(
    tests: Sequence[Path],
    timeout: float,
    log_dir: Path,
    thresholds: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[FileEvidence]:
    """Run each file through pytest in a fresh process, two at a time, limited to `timeout` seconds each.

    `thresholds`: the file whose limits generated tests judge by. `environment`: variables instead of this process's.
    No configuration of pytest's is read, in whatever folder the files lie.
    """
    variables = dict(os.environ if environment is None else environment)
    log_dir.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        try:
            return list(pool.map(lambda path: _run_file(path, timeout, log_dir, stop, thresholds, variables), tests))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run_file(
    path: Path,
    timeout: float,
    log_dir: Path,
    stop: threading.Event,
    thresholds: Path | None,
    variables: Mapping[str, str],
) -> FileEvidence:
    with tempfile.TemporaryDirectory(prefix="equiport-evidence-") as work:
        records, outcomes = Path(work) / "records.jsonl", Path(work) / "outcomes.jsonl"
        records.touch()
        environment = {
            **variables,
            RECORDS_ENV: str(records),
            "EQUIPORT_OUTCOMES": str(outcomes),
            "NXD_CPU_MODE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        environment.pop(THRESHOLDS_ENV, None)
        if thresholds is not None:
            environment[THRESHOLDS_ENV] = str(thresholds.absolute())
        command = [
            "-m", "pytest", str(path), "-q", "-p", "equiport.stages.pytest_evidence",
            "-p", "no:cacheprovider", "--rootdir", str(path.parent), "-s", "--tb=short", "-c", os.devnull,
        ]  # fmt: skip
        reasons: list[Reason] = []
        log = log_dir / f"{path.stem}.log"
        with log.open("wb") as stream:
            code = _run(command, path.parent, environment, stream, timeout, stop)
        if code is None:
            reasons.append(Reason("TIMEOUT", f"did not end within {timeout:g} s", path.name))
        output = log.read_text(encoding="utf-8", errors="replace")
        found = _read(records, path, reasons)
        tests = _judge_outcomes(outcomes, code, found, path, reasons)
        return FileEvidence(path.name, found, tests, tuple(reasons), output)


def _run(
    command: list[str],
    folder: Path,
    environment: dict[str, str],
    stream: BinaryIO,
    timeout: float,
    stop: threading.Event,
) -> int | None:
    """The exit code; None when time was up or `stop` was set. What the process started ends with it."""
    end = time.monotonic() + timeout
    job = warm_server(FOR_TESTS).run(
        command, environment=environment, cwd=folder, stdout=stream.fileno(), stderr=stream.fileno(), new_session=True
    )
    while not stop.is_set() and time.monotonic() < end:
        try:
            return job.wait(min(_POLL, max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            continue
    job.kill()
    return None


def _read(records: Path, path: Path, reasons: list[Reason]) -> tuple[Record, ...]:
    try:
        return read_records(records)
    except EquiportError as error:
        reasons.append(Reason("RECORDS_INVALID", str(error), path.name))
        return ()


def _judge_outcomes(
    outcomes: Path, code: int | None, records: tuple[Record, ...], path: Path, reasons: list[Reason]
) -> int:
    notes = _outcomes(outcomes, path, reasons)
    seen = [item for item in notes if "test" in item]
    calls = [item for item in seen if item["when"] == "call"]
    for item in seen:
        name = item["test"].split("::", 1)[-1]
        if item["outcome"] == "failed":
            reasons.append(Reason("TEST_FAILED", item["detail"] or "failed", f"{path.name}::{name}"))
        elif item["outcome"] in ("skipped", "xfail"):
            reasons.append(
                Reason("TEST_SKIPPED", f"was {item['outcome']}: what is not run is no pass", f"{path.name}::{name}")
            )
        elif item["when"] == "call" and not any(_of_test(record, name) for record in records):
            reasons.append(
                Reason(ReasonCode.NO_COMPARISON.value, "passed without comparing anything", f"{path.name}::{name}")
            )
    reasons += [
        Reason("COMPARISON_REFUSED", "; ".join(item.message for item in record.reasons), record.name or path.name)
        for record in records
        if record.comparison is None
    ]
    reasons += [
        Reason("RECORDS_FORGED", f"{item['tampered']} touches the comparator's records", path.name)
        for item in notes
        if "tampered" in item
    ]
    collected = [name for item in notes for name in item.get("collected", ())]
    lost = [name for name in collected if name not in {item["test"] for item in seen}]
    if code is not None:
        reasons += [
            Reason("TEST_LOST", "was collected and left no outcome", f"{path.name}::{name.split('::', 1)[-1]}")
            for name in lost
        ]
    if not calls and not any(reason.code in ("TIMEOUT", "TEST_FAILED", "TEST_SKIPPED") for reason in reasons):
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, f"ran no test (pytest ended with {code})", path.name))
    elif code is not None and (
        code not in (0, 1)
        or not any("finished" in item for item in notes)
        or (code == 1 and not any(reason.code == "TEST_FAILED" for reason in reasons))
    ):
        reasons.append(Reason("TEST_ABORTED", f"pytest ended with {code}", path.name))
    return len(calls)


def _of_test(record: Record, name: str) -> bool:
    return record.test.split("::", 1)[-1] == name


def _outcomes(file: Path, path: Path, reasons: list[Reason]) -> list[dict[str, Any]]:
    """What the plugin wrote: the tests collected, an outcome each, the end of the session."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    try:
        notes = [json.loads(line) for line in lines]
        if all(isinstance(note, dict) for note in notes):
            return notes
    except json.JSONDecodeError:
        pass
    reasons.append(Reason("OUTCOMES_INVALID", "left outcomes that are not the plugin's", path.name))
    return []
