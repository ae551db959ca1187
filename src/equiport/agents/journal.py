"""The journal: every job that was ever begun, with its session and its cost, so that nothing is paid for twice."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from equiport.agents.backend import Denial, JobResult, Stop, Tokens


class JobRecord(BaseModel):
    """One job. `key`: hash of what it was asked; `running`: begun, and not known to have ended; `short`: the budget of
    the whole port ended it, so that it goes on when there is more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    key: str
    status: Literal["running", "ended"]
    session_id: str
    stop: Stop | None = None
    short: bool = False
    cost_usd: float = 0.0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    turns: int = 0
    seconds: float = 0.0
    denials: int = 0
    error: str = ""
    text: str = ""
    structured: Any = None
    transcript: str = ""

    def ended(self, result: JobResult, *, short: bool) -> JobRecord:
        """The record of a job that has ended."""
        return self.model_copy(
            update={
                "status": "ended",
                "session_id": result.session_id or self.session_id,
                "stop": result.stop,
                "short": short,
                "cost_usd": round(result.cost_usd, 6),
                "tokens_in": result.tokens.given,
                "tokens_out": result.tokens.made,
                "tokens_cached": result.tokens.cached,
                "turns": result.turns,
                "seconds": round(result.seconds, 2),
                "denials": len(result.denials),
                "error": result.error[:500],
                "text": result.text[:2000],
                "structured": result.structured,
            }
        )

    def result(self) -> JobResult:
        """What the job ended with. Denials are counted, their texts are in the transcript."""
        assert self.stop is not None
        return JobResult(
            stop=self.stop,
            text=self.text,
            structured=self.structured,
            cost_usd=self.cost_usd,
            tokens=Tokens(self.tokens_in, self.tokens_out, self.tokens_cached),
            turns=self.turns,
            session_id=self.session_id,
            denials=tuple(Denial("", "", "") for _ in range(self.denials)),
            error=self.error,
            transcript=self.transcript,
            seconds=self.seconds,
        )


class Journal(Protocol):
    """Keeps records; what is put in is on the disk when `put` returns."""

    def jobs(self) -> tuple[JobRecord, ...]:
        """All records, in the order in which the jobs were begun."""
        ...

    def put(self, record: JobRecord) -> None:
        """Add a record, or replace the one of the same session."""
        ...
