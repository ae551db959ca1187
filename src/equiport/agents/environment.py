"""What an agent's process is given: its settings, and the key, which code that agents write must never see."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from equiport.errors import EquiportError

SETTINGS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # without it the command line calls home
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",  # one result message a job
}
_KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN")
_CLOUDS = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")
_SECRET = (
    "ANTHROPIC_",
    "CLAUDE_CODE_OAUTH",
    "AWS_SECRET",
    "AWS_SESSION",
    "AWS_BEARER",
    "GOOGLE_APPLICATION_CREDENTIALS",
)


def is_secret(name: str) -> bool:
    """Whether an environment variable may hold a key."""
    return name.startswith(_SECRET)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that run what an agent wrote."""
    return {name: value for name, value in environment.items() if not is_secret(name)}


def check_installed() -> None:
    """Raises EquiportError unless the SDK is importable; importing it costs a second, so it is only looked for."""
    import importlib.util

    if importlib.util.find_spec("claude_agent_sdk") is None:
        raise EquiportError(
            "translation by agents needs claude-agent-sdk, which is not installed",
            field="--engine",
            remedy="Install it with: pip install 'equiport[agent]', or use --engine recipes.",
        )


def check_key(environment: Mapping[str, str]) -> None:
    """Raises EquiportError when nothing says whom to ask for a model."""
    if not any(environment.get(name) for name in (*_KEYS, *_CLOUDS)):
        raise EquiportError(
            "no key for a model is set",
            field="ANTHROPIC_API_KEY",
            remedy="Set it (or ANTHROPIC_AUTH_TOKEN, or a cloud's settings), or use --engine recipes.",
        )


@contextmanager
def taken_from(environment: dict[str, str] | None = None, *, needed: bool = True) -> Iterator[dict[str, str]]:
    """Keys and endpoint, out of this process's environment until the end: ports are imported and tested in it.

    `needed`: whether something must be there.

    Raises:
        EquiportError: no SDK, or no key.
    """
    source: dict[str, str] | os._Environ[str] = os.environ if environment is None else environment
    if needed:
        check_installed()
        check_key(source)
    taken = {name: source.pop(name) for name in list(source) if is_secret(name)}
    try:
        yield taken
    finally:
        source.update(taken)


def process_environment(taken: Mapping[str, str], home: Path) -> dict[str, str]:
    """Variables for the agent's process. Its conversations are kept below `home`, so that they can go on later."""
    return {**SETTINGS, "CLAUDE_CONFIG_DIR": str(home), **taken}
