"""What the comparator wrote while the watching job ran: results too good to be true, comparators that are not ours."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from equiport.audit.dynamic.probe import Probe
from equiport.compare.records import RECORDS_ENV, Record, read_records
from equiport.errors import EquiportError

CIRCULAR, JUDGE_CHANGED = "circular-comparison", "comparator-changed"


def comparator_facts(probe: Probe, changed: Sequence[str], files: Collection[str]) -> list[tuple[str, str, str]]:
    """Facts about the comparator and its records; `changed`: its functions that mean something else now.

    `files`: the audited ones, by real path.
    """
    facts = [(JUDGE_CHANGED, "", f"{', '.join(changed[:3])} was replaced while the tests ran")] if changed else []
    try:
        records = read_records(Path(os.environ.get(RECORDS_ENV, os.devnull)))
    except EquiportError as error:
        return [*facts, (JUDGE_CHANGED, "", f"the comparator's records cannot be believed: {error.line()}")]
    shared = _shared(probe, files)
    for record in records:
        said = _too_good(record, shared)
        if said:
            facts.append((CIRCULAR, record.test, f"{record.name}: {said}"))
    return facts


def _too_good(record: Record, shared: Sequence[str]) -> str:
    found = record.comparison
    if found is None or found.mode == "exact":
        return ""
    if found.r_ratio == 0.0:
        return "R = 0: the port in bfloat16 is the float32 reference to the last bit"
    identical = found.r32 == 0.0
    if identical and shared:
        return f"both sides are equal to the last bit and run the same code ({', '.join(shared[:2])})"
    return ""


def _shared(probe: Probe, files: Collection[str]) -> list[str]:
    """Functions of the audited files that ran on both sides; the stack's own code is no concern here."""
    return sorted(
        {
            code.co_name
            for code in probe.port_code & probe.other_code
            if not code.co_name.startswith("<") and os.path.realpath(code.co_filename) in files
        }
    )
