"""The backend on claude-agent-sdk: one query a job, with the command line that the SDK brings.

Nothing of the user's own settings is loaded, the tools are those of the job alone, and every call passes the guard.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from equiport.agents.backend import Denial, Job, JobResult, Session, Stop, Tokens
from equiport.agents.environment import check_installed, process_environment
from equiport.agents.guard import READING, WRITING, guard_hook

#: A full id: aliases move.
DEFAULT_MODEL = "claude-sonnet-4-5-20250929"
# on top of `tools`, which leaves them out: none of these is ever right here
_NEVER = ("Bash", "BashOutput", "KillShell", "Agent", "Task", "WebFetch", "WebSearch", "NotebookEdit", "Skill")
_GO_ON = "You were interrupted. Go on from where you stopped; what you wrote is still there. The task is unchanged."
_STOPS = {
    "error_max_turns": Stop.TURNS,
    "error_max_budget_usd": Stop.BUDGET,
    "error_max_structured_output_retries": Stop.UNSTRUCTURED,
}
_REASONS = {"refusal": Stop.REFUSED, "max_tokens": Stop.TRUNCATED, "model_context_window_exceeded": Stop.TRUNCATED}


class SdkBackend:
    """Runs jobs through the SDK. `home`: where it keeps conversations; `variables`: key and endpoint."""

    name = "claude-agent-sdk"

    def __init__(self, home: Path, variables: Mapping[str, str]) -> None:
        """Raises EquiportError when the SDK is not installed."""
        check_installed()
        self._home, self._variables = home, dict(variables)

    async def run(self, job: Job, session: Session, transcript: Path) -> JobResult:
        """Run one job; see `Backend`. A conversation that cannot be gone on with is begun anew."""
        result = await self._query(job, session, transcript)
        if session.resumed and result.stop is Stop.CRASHED and result.turns == 0:
            return await self._query(job, Session("", resumed=False), transcript)
        return result

    async def _query(self, job: Job, session: Session, transcript: Path) -> JobResult:
        denials: list[Denial] = []
        heard = _Heard(transcript)
        try:
            await asyncio.wait_for(self._listen(job, session, denials, heard), job.timeout)
        except asyncio.TimeoutError:
            return heard.result(job, denials, Stop.TIMEOUT, f"no end after {job.timeout:g} s")
        return heard.result(job, denials, None, "")

    async def _listen(self, job: Job, session: Session, denials: list[Denial], heard: _Heard) -> None:
        import claude_agent_sdk as sdk

        options = self._options(job, session, denials, heard)
        stream = sdk.query(prompt=_GO_ON if session.resumed else job.prompt, options=options)
        try:
            async for message in stream:
                heard.take(message)
        except sdk.ClaudeSDKError as error:
            # raised too after a result that tells of an error: that result says more
            heard.fault = heard.fault or f"{type(error).__name__}: {error}"

    def _options(self, job: Job, session: Session, denials: list[Denial], heard: _Heard) -> Any:
        import claude_agent_sdk as sdk

        self._home.mkdir(parents=True, exist_ok=True)
        job.access.workspace.mkdir(parents=True, exist_ok=True)
        guard: Any = guard_hook(job.access, denials)
        hook = sdk.HookMatcher(matcher=None, hooks=[guard], timeout=30, on_failure="block")
        conversation: dict[str, Any] = {}
        if session.id:
            conversation["resume" if session.resumed else "session_id"] = session.id
        return sdk.ClaudeAgentOptions(
            cwd=job.access.workspace.resolve(),
            system_prompt=job.system,
            tools=list(job.access.tools),
            allowed_tools=_rules(job),
            disallowed_tools=list(_NEVER),
            permission_mode="dontAsk",
            setting_sources=[],
            strict_mcp_config=True,
            verbatim_prompts=True,
            add_dirs=[str(root.resolve()) for root in job.access.readable if root.is_dir()],
            max_turns=job.max_turns,
            max_budget_usd=job.budget_usd if job.budget_usd != float("inf") else None,
            model=job.model or DEFAULT_MODEL,
            hooks={"PreToolUse": [hook]},
            output_format={"type": "json_schema", "schema": dict(job.schema)} if job.schema else None,
            env=process_environment(self._variables, self._home),
            stderr=heard.stderr,
            **conversation,
        )


def _rules(job: Job) -> list[str]:
    """Rules of the command line for the same access: a bare name would apply everywhere on the disk."""
    root = job.access.workspace.resolve()
    rules = [f"Edit(/{root}/**)"] if any(tool in WRITING for tool in job.access.tools) else []
    if any(tool in READING for tool in job.access.tools):
        roots = [(root, True), *((path.resolve(), path.is_dir()) for path in job.access.readable)]
        rules += [f"Read(/{path}/**)" if folder else f"Read(/{path})" for path, folder in roots]
    return rules


class _Heard:
    """What the SDK has said in one query, appended to the transcript as it comes."""

    def __init__(self, transcript: Path) -> None:
        self._transcript, self._last, self.fault = transcript, None, ""
        self._lines: list[str] = []

    def stderr(self, line: str) -> None:
        """A line of the command line's standard error; the last ones are kept for an error message."""
        self._lines = [*self._lines[-4:], line.strip()]

    def take(self, message: Any) -> None:
        """Keep a message."""
        kind = type(message).__name__
        if kind == "ResultMessage":
            self._last = message
        value = asdict(message) if is_dataclass(message) and not isinstance(message, type) else str(message)
        with self._transcript.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": kind, "message": value}, default=str) + "\n")

    def result(self, job: Job, denials: list[Denial], stop: Stop | None, why: str) -> JobResult:
        """The job's result; `stop` and `why` when something other than the SDK ended it."""
        last: Any = self._last
        if last is None:
            said = why or self.fault or " ".join(self._lines) or "the command line ended without a result"
            return JobResult(stop or Stop.CRASHED, denials=tuple(denials), error=said)
        told = "; ".join(map(str, last.errors or [])) or (last.result or "" if last.is_error else "")
        return JobResult(
            stop=stop or _stop(last, job),
            text=last.result or "",
            structured=last.structured_output,
            cost_usd=float(last.total_cost_usd or 0.0),
            tokens=_tokens(last),
            turns=last.num_turns,
            session_id=last.session_id,
            denials=tuple(denials),
            error=" ".join((why or told).split()),
        )


def _stop(last: Any, job: Job) -> Stop:
    """Why a query ended. A success may hold an API's error, or lack the answer that was asked for."""
    if last.subtype in _STOPS:
        return _STOPS[last.subtype]
    if last.stop_reason in _REASONS:
        return _REASONS[last.stop_reason]
    if last.api_error_status is not None or (last.is_error and last.subtype == "success"):
        return Stop.API
    if last.is_error or last.subtype != "success":
        return Stop.CRASHED
    if job.schema is not None and last.structured_output is None:
        return Stop.UNSTRUCTURED
    return Stop.DONE


def _tokens(last: Any) -> Tokens:
    """By model, which counts subagents; `usage` does not."""
    given = made = cached = 0
    for usage in (last.model_usage or {}).values():
        given += int(usage.get("inputTokens", 0))
        made += int(usage.get("outputTokens", 0))
        cached += int(usage.get("cacheReadInputTokens", 0)) + int(usage.get("cacheCreationInputTokens", 0))
    return Tokens(given, made, cached)
