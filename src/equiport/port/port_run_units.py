"""Phase 2: units are translated, written, and tested by the toolkit in a fresh process each."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from equiport.agents.environment import without_secrets
from equiport.audit.dynamic.unit import first_fault, judge_unit, run_unit_checks
from equiport.audit.engine import audit_files
from equiport.audit.render import PAGE_NAME, headline, mutation_line, page
from equiport.audit.report import AUDIT_NAME
from equiport.compare.verdict import Verdict
from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.port.translate import BLOCK_FILE, TEST_FILE, UnitFiles
from equiport.stages.component_evidence import FileEvidence, collect_evidence

_TOOLS = "block_testing_utils.py"


@dataclass(frozen=True)
class UnitTest:
    """How a unit's test ended. `log` is the whole output."""

    passed: bool
    line: str
    log: Path


def write_unit(units: Path, unit: str, files: UnitFiles) -> list[Path]:
    """Write a unit's two files into its folder, and the testing utilities beside the units."""
    write_toolkit(units)
    folder = units / unit
    return [write_text(folder / BLOCK_FILE, files.block), write_text(folder / TEST_FILE, files.test)]


def write_toolkit(units: Path) -> None:
    """The testing utilities beside the units, as the toolkit has them."""
    tools = units / _TOOLS
    text = (content_dir("scripts") / _TOOLS).read_text(encoding="utf-8")
    if not tools.is_file() or tools.read_text(encoding="utf-8") != text:
        write_text(tools, text)


def audit_unit(units: Path, unit: str) -> UnitTest | None:
    """Audit a unit's files and the testing utilities beside the units; None when its test may be believed."""
    folder = units / unit
    found = audit_files([*sorted(folder.rglob("*.py")), *sorted(units.glob("*.py"))], units)
    found.save(folder / AUDIT_NAME)
    log = write_text(folder / PAGE_NAME, page(found))
    if found.clean:
        return None
    first = found.counting[0]
    return UnitTest(False, f"{headline(found)}: {first.rule} at {first.file}:{first.line}: {first.message}", log)


def test_environment(units: Path, folder: Path) -> dict[str, str]:
    """Variables for a process that runs a unit's files: no keys, for what agents wrote is run there too."""
    paths = [str(folder), str(units), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **without_secrets(os.environ),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


# not a test of pytest's
test_environment.__test__ = False  # type: ignore[attr-defined]


def run_unit_test(units: Path, unit: str, timeout: float = 300.0, file: str = TEST_FILE) -> UnitTest:
    """Run the unit's test with this interpreter in a process of its own, without third-party pytest plugins.

    It passes by the records of the comparator and pytest's outcomes, never by what it prints. A test file that the
    audit does not find clean does not pass: it is not run. Nor does one that wrong ports pass too: they are tried
    beside it, in limited processes, unless `file` is the toolkit's own.
    """
    refused = audit_unit(units, unit)
    if refused is not None:
        return refused
    folder = units / unit
    if file != TEST_FILE:
        # the toolkit's own test: nobody need try whether it is one
        (ended,) = collect_evidence([folder / file], timeout, folder, environment=test_environment(units, folder))
        return _judged(ended, folder / f"{Path(file).stem}.log")
    with ThreadPoolExecutor(max_workers=1) as pool:
        wrong_ports = pool.submit(run_unit_checks, units, unit, file)
        (ended,) = collect_evidence([folder / file], timeout, folder, environment=test_environment(units, folder))
        judged = _judged(ended, folder / f"{Path(file).stem}.log")
        if not judged.passed:
            return judged
        found = judge_unit(units, unit, file, wrong_ports.result())
    fault = first_fault(found)
    return (
        UnitTest(False, fault, folder / PAGE_NAME)
        if fault
        else replace(judged, line=f"{judged.line}, {mutation_line(found)}")
    )


def _judged(ended: FileEvidence, log: Path) -> UnitTest:
    faults = sorted(ended.reasons, key=lambda reason: reason.code != "TEST_FAILED")
    failed = next((record for record in ended.records if record.verdict is not Verdict.PASS), None)
    if faults:
        return UnitTest(False, faults[0].message[:300], log)
    if failed is not None:
        why = "; ".join(reason.message for reason in failed.reasons)
        return UnitTest(False, f"{failed.name}: {failed.verdict.value} {why}"[:300], log)
    return UnitTest(True, f"{ended.tests} passed, {len(ended.records)} comparisons", log)
