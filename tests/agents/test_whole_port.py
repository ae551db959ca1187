"""A whole port by scripted agents: the real SDK and command line, nothing but loopback, a PASS that stages give."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from equiport.errors import ExitCode
from equiport.port import plan
from equiport.port.agent_limits import AgentLimits
from equiport.port.plan_blocks import available_recipes
from equiport.port.port_run import PortOptions, run_port

from . import nemotron_agents
from .loopback import Ask, Loopback, call


class Scripted:
    """The model behind all agents of one port. `together`: both translators must be at work before either writes."""

    def __init__(self, out: Path) -> None:
        self.out, self.together = out, threading.Barrier(2)

    def __call__(self, ask: Ask) -> Any:
        subject = ask.job
        if subject.startswith("open questions"):
            answers = [{"id": "disagree.use_qk_norm", "answer": "source", "reason": "modeling_olmo.py never reads it"}]
            return [call("StructuredOutput", answers=answers)]
        if subject.startswith("translate unit"):
            return self.unit(ask, subject.split()[2])
        if subject.startswith("patch"):
            return self.patch(ask)
        if subject.startswith("review"):
            return self.review(ask)
        raise AssertionError(f"nobody knows of {subject!r}")

    def unit(self, ask: Ask, unit: str) -> Any:
        found = re.search(r"IMPORTANT: attempt (\d+) was rejected", ask.task)
        attempt = int(found[1]) + 1 if found else 1
        if ask.turn == 0 and attempt == 1:
            self.together.wait(timeout=60)
        if unit == "attention":
            files = (nemotron_agents.ATTENTION, nemotron_agents.attention_test(cheats=attempt == 1))
        else:
            files = (nemotron_agents.norm_block(right=attempt > 1), nemotron_agents.norm_test())
        if ask.turn == 0:
            folder = self.out / "units" / unit
            return [
                call("Write", file_path=str(folder / name), content=text)
                for name, text in zip(("nxdi_block.py", "test_block.py"), files, strict=True)
            ]
        if ask.turn == 1:
            # a file that was written in an earlier session must be read before it is written again
            failed = [text for error, text in ask.results if error]
            if failed:
                return [call("Read", file_path=str(self.out / "units" / unit / name))
                        for name in ("nxdi_block.py", "test_block.py")]  # fmt: skip
            return "written"
        if ask.turn == 2:
            folder = self.out / "units" / unit
            return [
                call("Write", file_path=str(folder / name), content=text)
                for name, text in zip(("nxdi_block.py", "test_block.py"), files, strict=True)
            ]
        assert not any(error for error, _ in ask.results), ask.results
        return "written"

    def patch(self, ask: Ask) -> Any:
        name = re.search(r"^Write (\S+) in (.*)\.$", ask.task, re.MULTILINE)
        assert name
        if ask.turn == 0:
            return [call("Write", file_path=f"{name[2]}/{name[1]}", content=nemotron_agents.PATCH)]
        return "patched"

    @staticmethod
    def review(ask: Ask) -> Any:
        assert set(ask.tools) == {"Read", "StructuredOutput"} | ({"Glob", "Grep"} & set(ask.tools))
        finding = {"severity": "low", "file": "modeling_nemotron_nxdi.py", "line": 1, "why": "tp_degree is 1",
                   "finding": "one rank alone was run"}  # fmt: skip
        return [call("StructuredOutput", findings=[finding])]


@pytest.mark.slow
def test_a_port_with_blocks_that_no_recipe_knows(
    model: Loopback, alone: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "available_recipes", lambda stack: available_recipes(stack) - {"attention.gqa"})
    source, out = nemotron_agents.make_nemotron(alone / "hf"), alone / "port"
    model.script = Scripted(out)
    options = PortOptions(source, out, engine="auto", limits=AgentLimits(total_usd=20.0))
    code = run_port(options)
    said = capfd.readouterr().out
    assert code is ExitCode.PASS, said
    state = json.loads((out / "port_state.json").read_text())
    names = [item["name"] for item in state["jobs"]]
    assert sorted(names) == [
        "patch, attempt 1", "planner, attempt 1", "review, attempt 1", "unit attention, attempt 1",
        "unit attention, attempt 2", "unit embedding_norm, attempt 1", "unit embedding_norm, attempt 2",
    ]  # fmt: skip
    # what it cost, on the screen and in the state
    assert state["costs"]["usd"] == pytest.approx(sum(item["cost_usd"] for item in state["jobs"]), abs=1e-5)
    assert state["costs"]["usd_by_task"]["unit attention"] > 0
    assert re.search(r"^agents: unit attention: \d\.\d{4} USD, \d+ tokens$", said, re.MULTILINE)
    assert f"agents: {state['costs']['usd']:.4f} USD" in said
    # one cheated, one failed its test
    assert re.search(r"unit attention, attempt 1: rejected: .*reference-in-workspace", said), said
    assert re.search(r"unit embedding_norm, attempt 1: rejected: .*FAIL", said), said
    relaunches = {ask.job.split()[2]: ask.task for ask in model.asks if "IMPORTANT: attempt 1" in ask.task}
    assert "NemotronAttention straight from transformers.models.nemotron.modeling_nemotron" in relaunches["attention"]
    # the report: patched, advisory, deviations
    report = (out / "exp" / "EQUIVALENCE_REPORT.md").read_text()
    assert re.search(r"^\*\*PASS, stages 0-6.*patch", report, re.MULTILINE), report[:400]
    assert "one rank alone was run" in report and "no verdict above depends on it" in report
    assert "deviation: the table is sharded over the hidden dimension" in said
    assert "`norm.layernorm_offset` | translated by an agent" in (out / "README.md").read_text()
    answers = json.loads((out / "answers.json").read_text())["questions"]
    assert [(item["id"], item["answer"]) for item in answers] == [("disagree.use_qk_norm", "source")]
    # the same call again repeats nothing that was paid for
    before = len(model.asks)
    assert run_port(options) is ExitCode.PASS
    assert len(model.asks) == before
