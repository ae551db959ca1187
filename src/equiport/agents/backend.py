"""The border between the engine and whatever runs an agent: a job goes in, a typed result comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol


class Stop(str, Enum):
    """Why a job ended."""

    DONE = "done"
    TURNS = "turn limit"
    BUDGET = "budget"
    REFUSED = "refused by the model"
    TRUNCATED = "reply cut off"
    UNSTRUCTURED = "no structured answer"
    API = "API error"
    TIMEOUT = "time limit"
    CRASHED = "crashed"


@dataclass(frozen=True)
class Tokens:
    """Tokens of a job, those of its subagents included; `cached` were read from or written to the prompt cache."""

    given: int = 0
    made: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.given + self.made + self.cached


@dataclass(frozen=True)
class Denial:
    """A tool call that was refused."""

    tool: str
    target: str
    reason: str


@dataclass(frozen=True)
class Access:
    """What a job may touch: files to write, by name, at the top of `workspace`; folders and files to read."""

    workspace: Path
    tools: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    readable: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Job:
    """One piece of work. `schema`: a JSON schema that the answer must have; `timeout` in seconds; `stamp`: what else
    the answer depends on and the agent is not told."""

    name: str
    prompt: str
    system: str
    access: Access
    budget_usd: float
    max_turns: int
    timeout: float = 1800.0
    schema: Mapping[str, Any] | None = None
    model: str | None = None
    stamp: str = ""


@dataclass(frozen=True)
class Session:
    """The conversation that a job is held in; `resumed`: it was begun by an earlier process and goes on."""

    id: str
    resumed: bool = False


@dataclass(frozen=True)
class JobResult:
    """How a job ended. `cost_usd`: of the whole session, what an interrupted process had spent on it included."""

    stop: Stop
    text: str = ""
    structured: Any = None
    cost_usd: float = 0.0
    tokens: Tokens = Tokens()
    turns: int = 0
    session_id: str = ""
    denials: tuple[Denial, ...] = ()
    error: str = ""
    transcript: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def done(self) -> bool:
        """The agent came to an end of its own, with the answer that was asked for."""
        return self.stop is Stop.DONE


class Backend(Protocol):
    """Runs jobs. It keeps to `Access` whatever the model asks for, and raises for no fault of the model's."""

    name: str

    async def run(self, job: Job, session: Session, transcript: Path) -> JobResult:
        """Run one job to its end. Every message is appended to `transcript`, a line of JSON each, as it comes."""
        ...
