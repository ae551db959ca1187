"""The guard: decides about every tool call before it happens, and refuses whatever it does not understand.

Rules of the command line are a second wall: both must let a call pass.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from equiport.agents.backend import Access, Denial

Hook = Callable[[Any, Any, Any], Awaitable[dict[str, Any]]]

READING = ("Read", "Glob", "Grep")
WRITING = ("Write", "Edit")
#: The tool through which a structured answer is given.
ANSWERING = "StructuredOutput"
_PATHS = {"Read": ("file_path",), "Write": ("file_path",), "Edit": ("file_path",), "Glob": ("path",), "Grep": ("path",)}


def refusal(access: Access, tool: str, given: Mapping[str, Any]) -> str:
    """Why a tool call is refused; empty when it may happen.

    Links are followed before a path is judged. A file that has a second name elsewhere is not written to.
    """
    if tool == ANSWERING:
        return ""
    if tool not in access.tools:
        return f"{tool} is no tool of this job"
    if tool not in (*READING, *WRITING):
        return f"{tool} is not understood by the guard"
    told = [given[name] for name in _PATHS[tool] if given.get(name) is not None]
    if not told and tool in ("Glob", "Grep"):
        told = [str(access.workspace)]
    if len(told) != 1 or not isinstance(told[0], str) or not told[0].strip():
        return f"{tool} names no file"
    path = told[0]
    if path.startswith("~") or "\0" in path or "$" in path:
        return f"{path!r} is no plain path"
    if tool == "Glob" and not _stays(str(given.get("pattern", ""))):
        return "the pattern leaves its folder"
    if tool in WRITING:
        return _unwritable(access, path)
    real = _real(access.workspace, path)
    roots = [_real(access.workspace, str(root)) for root in (access.workspace, *access.readable)]
    return "" if any(_within(real, root) for root in roots) else f"{real} is not among what this job may read"


def _unwritable(access: Access, path: str) -> str:
    real, root = _real(access.workspace, path), _real(access.workspace, ".")
    if not _within(real, root):
        return f"{real} is outside the work folder {root}"
    if os.path.dirname(real) != root or os.path.basename(real) not in access.writable:
        allowed = ", ".join(access.writable) or "nothing"
        return f"{os.path.relpath(real, root)} is not to be written here; this job writes {allowed}"
    plain = os.path.join(root, os.path.basename(real))
    if os.path.islink(os.path.join(root, os.path.basename(path))) or os.path.islink(plain):
        return f"{plain} is a link"
    if os.path.lexists(plain) and os.lstat(plain).st_nlink > 1:
        return f"{plain} has a second name elsewhere"
    return ""


def _real(workspace: Path, path: str) -> str:
    return os.path.realpath(os.path.join(workspace, path))


def _within(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


def _stays(pattern: str) -> bool:
    return not os.path.isabs(pattern) and ".." not in Path(pattern).parts and not pattern.startswith("~")


def deny(reason: str) -> dict[str, Any]:
    """What a PreToolUse hook answers to refuse a call."""
    return {
        "hookSpecificOutput": {
            "hookEventName": "PreToolUse",
            "permissionDecision": "deny",
            "permissionDecisionReason": reason,
        }
    }


def fail_closed(hook: Hook) -> Hook:
    """A hook whose exceptions refuse the call: left to itself, a hook that raises lets the tool run."""

    @functools.wraps(hook)
    async def closed(given: Any, tool_use_id: Any, context: Any) -> dict[str, Any]:
        try:
            answer = await hook(given, tool_use_id, context)
            return answer if isinstance(answer, dict) else deny("the guard gave no answer")
        except Exception as error:
            return deny(f"the guard failed: {type(error).__name__}: {error}")

    return closed


def guard_hook(access: Access, denials: list[Denial]) -> Hook:
    """The PreToolUse hook of a job; what it refuses is added to `denials`."""

    async def guard(given: Any, tool_use_id: Any, context: Any) -> dict[str, Any]:
        tool, arguments = str(given["tool_name"]), given["tool_input"]
        reason = refusal(access, tool, arguments)
        if not reason:
            return {}
        target = next((str(arguments[name]) for name in ("file_path", "path", "command") if name in arguments), "")
        denials.append(Denial(tool, target[:300], reason))
        return deny(reason)

    return fail_closed(guard)
