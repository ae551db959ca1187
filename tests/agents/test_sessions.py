"""Sessions: what is paid for is not paid again, what is cut off goes on, and money that is gone stops everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from equiport.agents import environment
from equiport.agents.backend import Job, JobResult, Stop
from equiport.agents.budget import Budget, BudgetSpent
from equiport.agents.environment import check_installed, check_key, taken_from, without_secrets
from equiport.agents.sessions import ModelUnreachable, Sessions
from equiport.errors import EquiportError, ExitCode

from .conftest import job
from .fake_backend import DONE, FakeBackend, MemoryJournal


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Callable[..., Sessions]:
    def made(backend: FakeBackend, journal: MemoryJournal, total: float | None = None, spent: float = 0.0) -> Sessions:
        return Sessions(backend, journal, Budget(total, spent), tmp_path / "transcripts", said.append)

    return made


def run(sessions: Sessions, given: Job) -> JobResult:
    return asyncio.run(sessions.run(given))


def test_a_job_is_written_down_and_not_paid_twice(
    make: Callable[..., Sessions], workspace: Path, said: list[str]
) -> None:
    backend, journal = FakeBackend(), MemoryJournal()
    first = run(make(backend, journal), job(workspace))
    again = make(backend, journal)
    second = run(again, job(workspace))
    assert len(backend.ran) == 1 and second == first and again.budget.spent_usd == 0.0
    record = journal.records[0]
    assert record.status == "ended" and record.cost_usd == 0.5 and record.tokens_in == 1000
    assert Path(record.transcript).is_file()
    assert said[0].startswith("job, attempt 1: done, 2 turns, 1110 tokens, 0.5000 USD")
    assert said[1] == "job, attempt 1: paid for already (0.5000 USD)"


def test_another_task_is_another_job(make: Callable[..., Sessions], workspace: Path) -> None:
    backend, journal = FakeBackend(), MemoryJournal()
    run(make(backend, journal), job(workspace))
    run(make(backend, journal), job(workspace, prompt="Job: something else."))
    assert len(backend.ran) == 2 and len({item.transcript for item in journal.records}) == 2


def test_a_job_that_was_killed_goes_on_in_its_session(make: Callable[..., Sessions], workspace: Path) -> None:
    journal = MemoryJournal()

    def killed(given: Job) -> JobResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(make(FakeBackend(killed), journal), job(workspace))
    assert [item.status for item in journal.records] == ["running"]
    backend = FakeBackend(lambda given: replace(DONE, cost_usd=0.9))
    sessions = make(backend, journal)
    run(sessions, job(workspace))
    _, session = backend.ran[0]
    assert session.resumed and session.id == journal.records[0].session_id
    assert len(journal.records) == 1 and sessions.budget.spent_usd == 0.9


def test_the_budget_of_the_whole_port(make: Callable[..., Sessions], workspace: Path) -> None:
    backend, journal = FakeBackend(), MemoryJournal()
    sessions = make(backend, journal, total=0.6)
    run(sessions, job(workspace))
    assert backend.ran[0][0].budget_usd == 0.6
    with pytest.raises(BudgetSpent) as stopped:
        backend.answer = lambda given: replace(DONE, stop=Stop.BUDGET, cost_usd=0.12)
        run(sessions, job(workspace, name="next, attempt 1"))
    assert stopped.value.exit_code is ExitCode.PREREQUISITE and "--budget-usd" in str(stopped.value)
    with pytest.raises(BudgetSpent, match=r"budget of 0\.60 USD does not suffice for third.*0\.6200 spent"):
        run(sessions, job(workspace, name="third, attempt 1"))
    assert len(backend.ran) == 2
    # with more money the session that was cut short goes on, and only what is new is added
    backend.answer = lambda given: replace(DONE, cost_usd=0.3)
    richer = make(backend, journal, total=5.0, spent=0.62)
    run(richer, job(workspace, name="next, attempt 1"))
    assert backend.ran[-1][1].resumed and richer.budget.spent_usd == pytest.approx(0.62 + 0.18)


def test_a_jobs_own_budget_is_an_end_like_others(make: Callable[..., Sessions], workspace: Path) -> None:
    backend = FakeBackend(lambda given: replace(DONE, stop=Stop.BUDGET, cost_usd=1.1))
    assert run(make(backend, MemoryJournal(), total=50.0), job(workspace)).stop is Stop.BUDGET


@pytest.mark.parametrize("stop", [Stop.API, Stop.CRASHED, Stop.TIMEOUT])
def test_a_model_that_does_not_answer_stops_and_is_asked_again(
    stop: Stop, make: Callable[..., Sessions], workspace: Path
) -> None:
    backend, journal = FakeBackend(lambda given: JobResult(stop, error="API Error: 529")), MemoryJournal()
    with pytest.raises(ModelUnreachable, match="529.*The same command goes on") as stopped:
        run(make(backend, journal), job(workspace))
    assert stopped.value.exit_code is ExitCode.PREREQUISITE
    backend.answer = lambda given: DONE
    assert run(make(backend, journal), job(workspace)).done


def test_what_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EquiportError, match="ANTHROPIC_API_KEY: no key for a model is set"):
        check_key({})
    check_key({"ANTHROPIC_AUTH_TOKEN": "x"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EquiportError, match=r"not installed. Install it with: pip install 'equiport\[agent\]'"):
        check_installed()


def test_keys_are_out_of_reach_of_what_agents_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_installed", lambda: None)
    given = {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "u", "AWS_SECRET_ACCESS_KEY": "s", "PATH": "/bin"}
    variables = dict(given)
    with taken_from(variables) as taken:
        assert variables == {"PATH": "/bin"}
        assert taken == {name: value for name, value in given.items() if name != "PATH"}
    assert variables == given
    assert without_secrets(given) == {"PATH": "/bin"}
