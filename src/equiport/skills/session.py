"""A session of an agent CLI that has this repository as its plugin, by claude-agent-sdk. Imported when it is called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equiport.agents.environment import SETTINGS, check_key
from equiport.errors import EquiportError

_TOOLS = ("Skill", "Agent", "Bash", "Read", "Write", "Edit", "Glob", "Grep")


@dataclass(frozen=True)
class SessionSettings:
    """How a session runs. `environment` is laid over this process's own; `sources`: settings that the CLI reads."""

    budget_usd: float | None = None
    max_turns: int = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    plugin: Path | None = None
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class SessionEnd:
    """What the CLI loaded, and how it ended. `error` is empty after an end of its own."""

    skills: tuple[str, ...]
    agents: tuple[str, ...]
    plugin_errors: tuple[str, ...]
    text: str
    error: str
    cost_usd: float
    denied: tuple[str, ...]


def run_session(prompt: str, workspace: Path, settings: SessionSettings) -> SessionEnd:
    """Ask an agent CLI in `workspace`; it may write there, run equiport and its scripts, and nothing is asked back.

    Raises:
        EquiportError: the SDK is not installed.
    """
    if find_spec("claude_agent_sdk") is None:
        raise EquiportError("claude-agent-sdk is missing", remedy="pip install 'equiport[agent]'")
    return asyncio.run(_run(prompt, workspace.resolve(), settings))


async def _run(prompt: str, workspace: Path, settings: SessionSettings) -> SessionEnd:
    import claude_agent_sdk as sdk

    options = sdk.ClaudeAgentOptions(
        cwd=workspace,
        plugins=[{"type": "local", "path": str(settings.plugin)}] if settings.plugin else [],
        setting_sources=list(settings.sources),  # type: ignore[arg-type]
        tools=list(_TOOLS),
        allowed_tools=["Skill", "Agent", "Read", "Glob", "Grep", f"Edit(/{workspace}/**)", *_commands(settings.plugin)],
        permission_mode="dontAsk",
        strict_mcp_config=True,
        verbatim_prompts=True,
        max_turns=settings.max_turns,
        max_budget_usd=settings.budget_usd,
        env={**SETTINGS, **settings.environment},
        add_dirs=[str(settings.plugin)] if settings.plugin else [],
    )
    first: dict[str, Any] = {}
    last: Any = None
    problem = ""
    try:
        async for message in sdk.query(prompt=prompt, options=options):
            if isinstance(message, sdk.SystemMessage) and message.subtype == "init":
                first = message.data
            elif isinstance(message, sdk.ResultMessage):
                last = message
    except Exception as error:  # an error result is also raised, after it was given
        problem = " ".join(str(error).split())[:300]
    return _end(first, last, problem)


def _commands(plugin: Path | None) -> list[str]:
    """Rules for the commands that skills name; every other one is refused."""
    scripts = [f"Bash(python {plugin}/scripts/*)"] if plugin else []
    return ["Bash(equiport *)", "Bash(mkdir *)", "Bash(ls *)", *scripts]


def _end(first: Mapping[str, Any], last: Any, problem: str) -> SessionEnd:
    error = problem
    if last is not None and last.is_error:
        error = str(last.result or last.subtype)
    elif last is None:
        error = error or "no result came"
    return SessionEnd(
        _names(first.get("skills", ())),
        _names(first.get("agents", ())),
        tuple(str(item) for item in first.get("plugin_errors", ())),
        str(last.result or "") if last is not None else "",
        error,
        float(last.total_cost_usd or 0.0) if last is not None else 0.0,
        tuple(str(item) for item in (getattr(last, "permission_denials", None) or ())),
    )


def _names(items: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(item.get("name", "")) if isinstance(item, dict) else str(item) for item in items)


def has_key() -> bool:
    """Whether something says whom to ask for a model."""
    try:
        check_key(os.environ)
    except EquiportError:
        return False
    return True
