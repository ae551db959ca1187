"""The guard by itself: what it does not understand is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from equiport.agents.backend import Access
from equiport.agents.guard import fail_closed, guard_hook, refusal


@pytest.fixture
def access(tmp_path: Path) -> Access:
    (tmp_path / "ws").mkdir()
    (tmp_path / "source").mkdir()
    tools = ("Read", "Write", "Edit", "Glob", "Grep")
    return Access(tmp_path / "ws", tools, ("out.py",), (tmp_path / "source",))


def test_what_is_allowed(access: Access, tmp_path: Path) -> None:
    assert refusal(access, "Write", {"file_path": "out.py"}) == ""
    assert refusal(access, "Edit", {"file_path": str(access.workspace / "out.py")}) == ""
    assert refusal(access, "Read", {"file_path": str(tmp_path / "source" / "deep" / "a.py")}) == ""
    assert refusal(access, "Grep", {"pattern": "x"}) == "" and refusal(access, "Glob", {"pattern": "**/*.py"}) == ""
    assert refusal(access, "StructuredOutput", {"anything": 1}) == ""


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("Write", {}),
        ("Write", {"file_path": None}),
        ("Write", {"file_path": ["out.py"]}),
        ("Write", {"file_path": "  "}),
        ("Write", {"file_path": "other.py"}),
        ("Write", {"file_path": "../source/a.py"}),
        ("Write", {"file_path": "../ws2/out.py"}),
        ("Write", {"file_path": "$HOME/out.py"}),
        ("Read", {"file_path": "/etc/passwd"}),
        ("Read", {"file_path": "../source2/a.py"}),
        ("Glob", {"pattern": "/etc/*"}),
        ("Glob", {"pattern": "../../*"}),
        ("Glob", {"pattern": "*", "path": "/"}),
        ("Bash", {"command": "ls"}),
        ("NotebookEdit", {"notebook_path": "out.py"}),
        ("mcp__any__write", {"file_path": "out.py"}),
    ],
)
def test_what_is_refused(tool: str, given: dict[str, Any], access: Access) -> None:
    assert refusal(access, tool, given)


def test_a_reading_job_writes_nothing(access: Access) -> None:
    reading = Access(access.workspace, ("Read", "Write"), ())
    assert "this job writes nothing" in refusal(reading, "Write", {"file_path": "out.py"})


def test_a_hook_that_raises_or_says_nothing_refuses(access: Access) -> None:
    async def raises(*given: Any) -> dict[str, Any]:
        raise KeyError("tool_name")

    async def silent(*given: Any) -> Any:
        return None

    for hook in (fail_closed(raises), fail_closed(silent), guard_hook(access, [])):
        answer = asyncio.run(hook({}, None, None))
        assert answer["hookSpecificOutput"]["permissionDecision"] == "deny"
