"""The comparator's own records: one JSON line per checked comparison, written where EQUIPORT_RECORDS points.

Stages believe these lines, never what a test printed or returned. A record holds raw metrics and the threshold that was
used, so that it can be judged again; the reader does so and refuses a line whose verdict does not follow from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from equiport.compare.comparison import Comparison, Labels
from equiport.compare.gates import GateResult, judge
from equiport.compare.numbers import Frozen, Number
from equiport.compare.thresholds import SHIPPED_THRESHOLDS, Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError

#: The environment variable that names the file of records.
RECORDS_ENV = "EQUIPORT_RECORDS"


class Record(Frozen):
    """One checked comparison. `comparison` is None when the tensors could not be compared at all (always a FAIL).

    `test` is the pytest node id; `tolerance_ratio` the R limit that the test asked for.
    """

    format: Literal[1] = 1
    name: str
    labels: Labels = Labels()
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    blind_spots: tuple[Reason, ...] = ()
    tolerance_ratio: Number | None = None
    comparison: Comparison | None = None
    test: str = ""
    pid: int

    def judged(self, thresholds: Thresholds = SHIPPED_THRESHOLDS, tolerance_ratio: float | None = None) -> GateResult:
        """The record judged again from its raw metrics; without a comparison it stays the failure that it is."""
        if self.comparison is None:
            return GateResult("comparison", Verdict.FAIL, self.reasons)
        return judge(self.comparison, thresholds, tolerance_ratio)


def make_record(
    name: str,
    *,
    comparison: Comparison | None = None,
    result: GateResult | None = None,
    reasons: tuple[Reason, ...] = (),
    tolerance_ratio: float | None = None,
    labels: Labels | None = None,
) -> Record:
    """A record of this process and the running test; without a result its verdict is FAIL."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return Record(
        name=name,
        labels=labels or (comparison.labels if comparison else Labels()),
        verdict=result.verdict if result else Verdict.FAIL,
        reasons=result.reasons if result else reasons,
        notes=result.notes if result else (),
        blind_spots=result.blind_spots if result else (),
        tolerance_ratio=tolerance_ratio,
        comparison=comparison,
        test=test.rsplit(" (", 1)[0],
        pid=os.getpid(),
    )


def append_record(record: Record, path: str | Path | None = None) -> bool:
    """Append one line to `path`, default the file named by EQUIPORT_RECORDS; False when there is none.

    The line is written by one call in append mode, so several processes may share the file.

    Raises:
        EquiportError: the file cannot be written: evidence is never dropped silently.
    """
    target = os.environ.get(RECORDS_ENV, "") if path is None else str(path)
    if not target:
        return False
    line = (record.model_dump_json() + "\n").encode()
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.write(handle, line) != len(line):
                raise OSError("short write")
        finally:
            os.close(handle)
    except OSError as error:
        raise EquiportError(f"cannot append a record: {error}", where=target, field=RECORDS_ENV) from error
    return True


def read_records(path: str | Path) -> tuple[Record, ...]:
    """All records of a file, validated and judged again with the threshold that each one names.

    An empty file gives an empty tuple: the caller must treat that as no evidence.

    Raises:
        EquiportError: the file is missing, a line is no record (named by its number), or a verdict does not follow
            from the metrics beside it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EquiportError(
            f"cannot read the records: {error}", where=path, remedy="Run the tests with this stage's script."
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise EquiportError(f"no valid record: {first['msg']}", where=f"{path}:{number}", field=field) from error
        again = record.judged(tolerance_ratio=record.tolerance_ratio).verdict
        if again is not record.verdict:
            raise EquiportError(
                f"says {record.verdict.value}, its metrics say {again.value}",
                where=f"{path}:{number}",
                field="verdict",
                remedy="Delete the file and run the tests again.",
            )
        records.append(record)
    return tuple(records)
