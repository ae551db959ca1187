"""Open questions, budgets and refusals of a whole port, up to the units; no model, the toolkit is real."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equiport.agents.backend import Job, JobResult, Stop
from equiport.agents.budget import BudgetSpent
from equiport.agents.sessions import ModelUnreachable
from equiport.errors import ExitCode, OpenQuestionError
from equiport.port.agent_limits import AgentLimits
from equiport.port.port_run import PortOptions, run_port
from equiport.port.questions import write_answers
from equiport.port.translate_agent import UnitFailed

from . import olmo_agents
from .fake_backend import DONE, FakeBackend

RIGHT = {"id": "disagree.mlp_bias", "answer": "source", "reason": "OlmoMLP has bias=False throughout"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(olmo_agents.CONFIG))
    return folder


def planner(*answers: Any) -> Callable[[Job], JobResult]:
    """A planner that gives these answers in turn; translators refuse."""
    left = list(answers)

    def answer(job: Job) -> JobResult:
        if job.name.startswith("planner"):
            return replace(DONE, structured=left.pop(0))
        return replace(DONE, stop=Stop.REFUSED)

    return answer


def port(source: Path, backend: FakeBackend, **given: Any) -> ExitCode:
    limits = AgentLimits(**given.pop("limits", {"attempts": 2}))
    return run_port(PortOptions(source, source.parent / "out", engine="auto", limits=limits, **given), backend)


def state(source: Path) -> dict[str, Any]:
    return json.loads((source.parent / "out" / "port_state.json").read_text())


def test_a_proposal_is_checked_and_goes_into_the_answers(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [{"answers": [{**RIGHT, "answer": "config"}]}, {"answers": [{**RIGHT, "id": "disagree.other"}]}]
    backend = FakeBackend(planner(*wrong, {"answers": [RIGHT]}))
    with pytest.raises(UnitFailed):
        port(source, backend, limits={"attempts": 3})
    tasks = [job for job, _ in backend.ran if job.name.startswith("planner")]
    assert len(tasks) == 3 and tasks[0].access.tools == ("Read",) and tasks[0].access.writable == ()
    assert "'config' is no accepted answer to disagree.mlp_bias" in tasks[1].prompt
    assert "nobody asks disagree.other" in tasks[2].prompt
    answers = json.loads((source.parent / "out" / "answers.json").read_text())["questions"]
    assert [(item["id"], item["answer"]) for item in answers] == [("disagree.mlp_bias", "source")]
    assert "planner: disagree.mlp_bias: source (OlmoMLP has bias=False" in capsys.readouterr().out
    assert json.loads((source.parent / "out" / "port_plan.json").read_text())["answers"] == {
        "disagree.mlp_bias": "source"
    }


def test_what_the_planner_leaves_open_stops_the_port(source: Path) -> None:
    backend = FakeBackend(planner({"answers": []}))
    with pytest.raises(OpenQuestionError, match=r"1 questions are open.*--answers"):
        port(source, backend)
    # the same call asks nobody again
    with pytest.raises(OpenQuestionError):
        port(source, backend)
    assert backend.names == ["planner, attempt 1"]


def test_a_persons_answers_win(source: Path, tmp_path: Path) -> None:
    from equiport.port.fingerprint_reader import fingerprint

    asked = fingerprint(source).questions
    file = write_answers(tmp_path / "answers.json", asked, {"disagree.mlp_bias": "stop"})
    backend = FakeBackend(planner({"answers": [RIGHT]}))
    with pytest.raises(OpenQuestionError, match="stopped by the answer to disagree.mlp_bias"):
        port(source, backend, answers=file)
    assert backend.ran == []


def test_a_spent_budget_ends_with_4_and_goes_on_with_more(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend(planner({"answers": [RIGHT]}))
    with pytest.raises(BudgetSpent, match=r"budget of 0\.40 USD does not suffice for unit .*attempt 1") as stopped:
        port(source, backend, limits={"attempts": 2, "total_usd": 0.4})
    assert stopped.value.exit_code is ExitCode.PREREQUISITE
    assert state(source)["costs"]["usd"] == 0.5 and state(source)["steps"]["plan"]["status"] == "done"
    assert "agents: 0.5000 USD, 1110 tokens in all" in capsys.readouterr().out
    with pytest.raises(UnitFailed):
        port(source, backend, limits={"attempts": 2, "total_usd": 10.0})
    assert backend.names.count("planner, attempt 1") == 1
    assert state(source)["costs"]["usd"] == pytest.approx(0.5 * len(backend.ran))


def test_a_model_that_is_out_of_reach_ends_with_4(source: Path) -> None:
    backend = FakeBackend(lambda job: JobResult(Stop.API, error="API Error: 529 overloaded"))
    with pytest.raises(ModelUnreachable, match="529") as stopped:
        port(source, backend)
    assert stopped.value.exit_code is ExitCode.PREREQUISITE


def test_both_units_are_tried_though_one_fails(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend(planner({"answers": [RIGHT]}))
    with pytest.raises(UnitFailed, match="unit attention: none of 2 attempts"):
        port(source, backend)
    assert sorted(backend.names) == [
        "planner, attempt 1", "unit attention, attempt 1", "unit attention, attempt 2",
        "unit embedding_norm, attempt 1", "unit embedding_norm, attempt 2",
    ]  # fmt: skip
    steps = state(source)["steps"]
    assert steps["unit attention"]["status"] == steps["unit embedding_norm"]["status"] == "failed"
    assert "unit embedding_norm: none of 2 attempts" in capsys.readouterr().out
