"""`equiport port --engine auto` cut off in the middle of two agents' work: what was paid for is not paid again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import equiport_command

from . import olmo_agents
from .loopback import Ask, Loopback, call


class Slow:
    """Translators that write bad files and then think, until they are told to end."""

    def __init__(self, out: Path) -> None:
        self.out, self.thinking, self.on = out, set[str](), threading.Event()

    def __call__(self, ask: Ask) -> Any:
        if ask.job.startswith("open questions"):
            return [call("StructuredOutput", answers=[{"id": "disagree.mlp_bias", "answer": "source", "reason": "x"}])]
        unit = ask.job.split()[2]
        if ask.turn == 0:
            block = olmo_agents.ATTENTION if unit == "attention" else olmo_agents.norm_block(right=False)
            test = olmo_agents.attention_test(cheats=True)
            folder = self.out / "units" / unit
            return [
                call("Write", file_path=str(folder / "nxdi_block.py"), content=block),
                call("Write", file_path=str(folder / "test_block.py"), content=test),
            ]
        self.thinking.add(unit)
        self.on.wait(timeout=300)
        return "written"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_cut_off_and_gone_on(how: signal.Signals, model: Loopback, alone: Path) -> None:
    source, out = olmo_agents.make_olmo(alone / "hf"), alone / "port"
    model.script = slow = Slow(out)

    def start() -> subprocess.Popen[str]:
        command = equiport_command("port", source, "--out", out, "--engine", "auto", "--attempts", 1)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def jobs() -> dict[str, dict[str, Any]]:
        return {item["name"]: item for item in json.loads((out / "port_state.json").read_text())["jobs"]}

    first = start()
    deadline = time.monotonic() + 240
    while len(slow.thinking) < 2:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    (os.kill if how is signal.SIGKILL else os.killpg)(first.pid, how)
    said, errors = first.communicate(timeout=60)
    assert first.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL), errors
    before = jobs()
    assert {name: item["status"] for name, item in before.items()} == {
        "planner, attempt 1": "ended",
        "unit attention, attempt 1": "running",
        "unit embedding_norm, attempt 1": "running",
    }  # fmt: skip
    asked = len(model.asks)
    slow.on.set()

    second = start()
    said, errors = second.communicate(timeout=280)
    # both units are bad, so that the command ends here
    assert second.returncode == 1, (said, errors)
    assert "plan: up to date" in said and "none of 1 attempts was accepted" in errors
    after = jobs()
    assert {name: item["session_id"] for name, item in after.items()} == {
        name: item["session_id"] for name, item in before.items()
    }
    new = model.asks[asked:]
    assert all("You were interrupted" in json.dumps(ask.body) and ask.turn >= 1 for ask in new), [a.job for a in new]
    assert {ask.job.split()[2] for ask in new} == {"attention", "embedding_norm"}
    # the cost of a session counts what the process that was killed had spent on it
    assert all(item["cost_usd"] > 0 and item["turns"] >= 1 for item in after.values())

    third = start()
    said, errors = third.communicate(timeout=280)
    assert third.returncode == 1 and len(model.asks) == asked + len(new), said
