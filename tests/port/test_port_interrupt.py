"""`equiport port` stopped in the middle: Ctrl-C ends with 130 and one line, a kill leaves a state to go on from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import equiport_command

from equiport.errors import ExitCode
from equiport.port import port_run, port_run_translate
from equiport.port.port_run import PortOptions, run_port
from equiport.port.port_run_units import UnitTest

from .families import make_model


def start(model: Path, out: Path) -> subprocess.Popen[str]:
    """The command in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        equiport_command("port", model, "--out", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip


def steps(out: Path) -> dict[str, str]:
    """Step -> status, from a state file that must be whole whenever it is there."""
    file = out / "port_state.json"
    return (
        {name: step["status"] for name, step in json.loads(file.read_text())["steps"].items()} if file.exists() else {}
    )


def stop_when(running: subprocess.Popen[str], when: Callable[[], bool], number: signal.Signals) -> tuple[str, str]:
    deadline = time.monotonic() + 200
    while not when():
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.05)
    os.killpg(running.pid, number)
    return running.communicate(timeout=60)


def test_stopped_and_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = make_model("llama", tmp_path), tmp_path / "out"
    units = out / "units"
    first = start(model, out)
    _, errors = stop_when(first, lambda: (units / "attention" / "test_block.py").exists(), signal.SIGINT)
    assert first.returncode == 130
    assert errors.strip().splitlines()[-1] == (
        "equiport: interrupted. What is done is kept; the same command goes on from there."
    )
    assert errors.count("equiport: ") == 1 and "Traceback" not in errors
    assert steps(out) == {"plan": "done"}
    # temporary files begin with a dot
    assert [path for path in out.rglob("*") if path.name.startswith(".")] == []

    second = start(model, out)
    said, _ = stop_when(second, lambda: (units / "position" / "test_block.py").exists(), signal.SIGKILL)
    assert second.returncode == -signal.SIGKILL
    assert "plan: up to date" in said
    assert steps(out) == {"plan": "done", "unit attention": "done"}

    tested: list[str] = []

    def passes(folder: Path, unit: str) -> UnitTest:
        tested.append(unit)
        return UnitTest(True, "1 passed", folder / unit / "test.log")

    monkeypatch.setattr(port_run, "_experiment", lambda *_: ExitCode.PASS)
    monkeypatch.setattr(port_run_translate, "run_unit_test", passes)
    assert run_port(PortOptions(model, out)) is ExitCode.PASS
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("up to date")] == ["plan: up to date", "unit attention: up to date"]
    planned = [unit["id"] for unit in json.loads((out / "port_plan.json").read_text())["units"]]
    assert tested == [unit for unit in planned if unit != "attention"]
    assert set(steps(out).values()) == {"done"}
