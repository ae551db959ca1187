"""An agent CLI of its own: nothing of this machine's settings, a scripted server, every other address dead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents.loopback import Loopback
from worlds import EXAMPLE_PORT

SOURCE = EXAMPLE_PORT.parents[2] / "src"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH with `equiport` and `python` of this interpreter."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in (
        ("equiport", f'exec {sys.executable} -c "from equiport.cli import main; main()" "$@"'),
        ("python", f'exec {sys.executable} "$@"'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def agent_cli(tmp_path: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    """The scripted server; the environment is made from nothing, since the SDK hands all of it to the CLI."""
    for name in list(os.environ):
        if not name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    for name in ("home", "settings", "temporary"):
        (tmp_path / name).mkdir()
    with Loopback(lambda _: "nothing is scripted") as server:
        for name, value in {
            "PATH": f"{commands}:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": tmp_path / "home",
            "CLAUDE_CONFIG_DIR": tmp_path / "settings", "TMPDIR": tmp_path / "temporary",
            "ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_MAX_RETRIES": "0",
            "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        yield server
        assert server.faults == []
        assert set(server.others) <= {"HEAD /api/hello"}
