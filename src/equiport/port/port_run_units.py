"""Phase 2: units are translated, written, and tested by the toolkit in a fresh process each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from equiport.audit.engine import audit_files
from equiport.audit.render import PAGE_NAME, headline, page
from equiport.audit.report import AUDIT_NAME
from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.port.translate import BLOCK_FILE, TEST_FILE, UnitFiles

_TOOLS = "block_testing_utils.py"


@dataclass(frozen=True)
class UnitTest:
    """How a unit's test ended. `log` is the whole output."""

    passed: bool
    line: str
    log: Path


def write_unit(units: Path, unit: str, files: UnitFiles) -> list[Path]:
    """Write a unit's two files into its folder, and the testing utilities beside the units."""
    tools = units / _TOOLS
    text = (content_dir("scripts") / _TOOLS).read_text(encoding="utf-8")
    if not tools.is_file() or tools.read_text(encoding="utf-8") != text:
        write_text(tools, text)
    folder = units / unit
    return [write_text(folder / BLOCK_FILE, files.block), write_text(folder / TEST_FILE, files.test)]


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


def run_unit_test(units: Path, unit: str, timeout: float = 300.0) -> UnitTest:
    """Run the unit's test with this interpreter in a process of its own, without third-party pytest plugins.

    A test file without a passed test does not pass, nor does one that the audit does not find clean: it is not run.
    """
    refused = audit_unit(units, unit)
    if refused is not None:
        return refused
    folder = units / unit
    log = folder / "test.log"
    command = [
        sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(folder),
        "--import-mode=prepend", str(folder / TEST_FILE),
    ]  # fmt: skip
    paths = [str(units), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        # pytest's own last word is the end of standard output
        output, code = ended.stderr + ended.stdout, ended.returncode
    except subprocess.TimeoutExpired:
        output, code = f"no end after {timeout:g} s", -1
    write_text(log, output)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    said = [line for line in output.splitlines() if line.strip()]
    failing = [line[1:].strip() for line in said if line.startswith("E ")]
    passed = code == 0 and bool(said) and " passed" in said[-1]
    return UnitTest(passed, (said[-1] if passed or not failing else failing[0])[:300] if said else "no output", log)
