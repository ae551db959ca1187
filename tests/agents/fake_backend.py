"""A backend without a model: a function of the job that may write into the work folder and says how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from equiport.agents.backend import Job, JobResult, Session, Stop, Tokens
from equiport.agents.journal import JobRecord

DONE = JobResult(Stop.DONE, text="done", cost_usd=0.5, tokens=Tokens(1000, 100, 10), turns=2)


@dataclass
class FakeBackend:
    """`ran`: (job, session) of every run. `together`: most that ran at once."""

    answer: Callable[[Job], JobResult] = lambda job: DONE
    name: str = "fake"
    ran: list[tuple[Job, Session]] = field(default_factory=list)
    together: int = 0
    _now: int = 0

    async def run(self, job: Job, session: Session, transcript: Path) -> JobResult:
        self.ran.append((job, session))
        self._now += 1
        self.together = max(self.together, self._now)
        await asyncio.sleep(0.01)
        self._now -= 1
        transcript.write_text("{}\n")
        result = self.answer(job)
        return replace(result, session_id=result.session_id or session.id)

    @property
    def names(self) -> list[str]:
        return [job.name for job, _ in self.ran]


@dataclass
class MemoryJournal:
    """A journal that forgets at the end."""

    records: list[JobRecord] = field(default_factory=list)

    def jobs(self) -> tuple[JobRecord, ...]:
        return tuple(self.records)

    def put(self, record: JobRecord) -> None:
        for place, known in enumerate(self.records):
            if (known.name, known.transcript) == (record.name, record.transcript):
                self.records[place] = record
                return
        self.records.append(record)
