"""Run component test files, each in a process of its own, and collect what the comparator recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from equiport.compare.reasons import ReasonCode
from equiport.compare.records import RECORDS_ENV, Record, read_records
from equiport.compare.verdict import Reason
from equiport.errors import EquiportError

_WORKERS = 2


@dataclass(frozen=True)
class FileEvidence:
    """What one test file left: records, tests run, and everything that forbids to believe it."""

    file: str
    records: tuple[Record, ...]
    tests: int
    reasons: tuple[Reason, ...]
    output: str


def collect_evidence(tests: Sequence[Path], timeout: float, log_dir: Path) -> list[FileEvidence]:
    """Run each file through pytest in a fresh process, two at a time, limited to `timeout` seconds each."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=_WORKERS) as pool:
        return list(pool.map(lambda path: _run_file(path, timeout, log_dir), tests))


def _run_file(path: Path, timeout: float, log_dir: Path) -> FileEvidence:
    with tempfile.TemporaryDirectory(prefix="equiport-evidence-") as work:
        records, outcomes = Path(work) / "records.jsonl", Path(work) / "outcomes.jsonl"
        records.touch()
        environment = {
            **os.environ,
            RECORDS_ENV: str(records),
            "EQUIPORT_OUTCOMES": str(outcomes),
            "NXD_CPU_MODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable, "-m", "pytest", str(path), "-q", "-p", "equiport.stages.pytest_evidence",
            "-p", "no:cacheprovider", "--rootdir", str(path.parent), "-s", "--tb=short", "-c", os.devnull,
        ]  # fmt: skip
        reasons: list[Reason] = []
        try:
            done = subprocess.run(
                command, cwd=path.parent, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
            output, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            output, code = _text(error.stdout) + _text(error.stderr), -1
            reasons.append(Reason("TIMEOUT", f"did not end within {timeout:g} s", path.name))
        (log_dir / f"{path.stem}.log").write_text(output, encoding="utf-8")
        found = _read(records, path, reasons)
        tests = _judge_outcomes(outcomes, code, found, path, reasons)
        return FileEvidence(path.name, found, tests, tuple(reasons), output)


def _read(records: Path, path: Path, reasons: list[Reason]) -> tuple[Record, ...]:
    try:
        return read_records(records)
    except EquiportError as error:
        reasons.append(Reason("RECORDS_INVALID", str(error), path.name))
        return ()


def _judge_outcomes(outcomes: Path, code: int, records: tuple[Record, ...], path: Path, reasons: list[Reason]) -> int:
    lines = outcomes.read_text(encoding="utf-8").splitlines() if outcomes.is_file() else []
    seen = [json.loads(line) for line in lines]
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
    if not calls and not any(reason.code in ("TIMEOUT", "TEST_FAILED", "TEST_SKIPPED") for reason in reasons):
        reasons.append(Reason(ReasonCode.NO_COMPARISON.value, f"ran no test (pytest ended with {code})", path.name))
    elif code not in (0, 1, -1):
        reasons.append(Reason("TEST_ABORTED", f"pytest ended with {code}", path.name))
    return len(calls)


def _of_test(record: Record, name: str) -> bool:
    return record.test.split("::", 1)[-1] == name


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""
