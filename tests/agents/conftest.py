"""The real SDK and its command line against the scripted model, in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from equiport.agents.backend import Access, Job
from equiport.agents.sdk_backend import SdkBackend

from .loopback import Loopback

_KEPT = ("PYTEST_", "OMP_", "PYTHON", "VIRTUAL_ENV", "TRANSFORMERS_", "HF_")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """os.environ from scratch, since the SDK hands it on; homes of its own; a dead proxy, so that nothing gets out."""
    for name in list(os.environ):
        if not name.startswith(_KEPT):
            monkeypatch.delenv(name, raising=False)
    dead = "http://127.0.0.1:9"
    for name, value in {
        "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": tmp_path / "home", "TMPDIR": tmp_path / "tmp",
        "HTTP_PROXY": dead, "HTTPS_PROXY": dead, "NO_PROXY": "127.0.0.1", "CLAUDE_CODE_MAX_RETRIES": "0",
        "ANTHROPIC_API_KEY": "not-a-key",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def model(alone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """The scripted model; set its `script`. At the end nothing else may have been asked for."""
    with Loopback(lambda ask: "done") as server:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
        yield server
        assert server.faults == []
        assert set(server.others) <= {"HEAD /api/hello"}


@pytest.fixture
def backend(alone: Path, model: Loopback) -> SdkBackend:
    """The real backend, asking the scripted model."""
    return SdkBackend(alone / "cli", {"ANTHROPIC_API_KEY": "not-a-key", "ANTHROPIC_BASE_URL": model.url})


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An agent's folder."""
    folder = tmp_path / "ws"
    folder.mkdir()
    return folder


def job(workspace: Path, **changes: object) -> Job:
    """A job that may write out.py."""
    given: dict[str, object] = {
        "name": "job, attempt 1", "prompt": "Job: something.", "system": "You are a test.",
        "access": Access(workspace, ("Read", "Write", "Edit"), ("out.py",)), "budget_usd": 1.0, "max_turns": 8,
        "timeout": 60.0,
    }  # fmt: skip
    return Job(**{**given, **changes})  # type: ignore[arg-type]
