"""Sessions: jobs run within the budget, written down before they begin and when they have ended."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from equiport.agents.backend import Backend, Job, JobResult, Session, Stop
from equiport.agents.budget import Budget, BudgetSpent
from equiport.agents.journal import JobRecord, Journal
from equiport.errors import EquiportError, ExitCode

#: Ends of a job that a later run may mend: they are no answer, and the job is asked again then.
_PASSING = (Stop.API, Stop.CRASHED, Stop.TIMEOUT)


class ModelUnreachable(EquiportError):
    """The model did not answer; what is done is kept."""

    exit_code = ExitCode.PREREQUISITE


class Sessions:
    """Runs jobs by one backend for one folder. A job that has ended is not run again, one that was cut off goes on."""

    def __init__(
        self, backend: Backend, journal: Journal, budget: Budget, folder: Path, say: Callable[[str], None]
    ) -> None:
        """`folder`: where transcripts are kept."""
        self.backend, self.budget, self.say = backend, budget, say
        self._journal, self._folder = journal, folder

    def cost_of(self, task: str) -> float:
        """USD that all jobs of one task have cost: those named `task`, attempt by attempt."""
        return sum(item.cost_usd for item in self._journal.jobs() if item.name.partition(", attempt")[0] == task)

    async def run(self, job: Job) -> JobResult:
        """The job's result: from the journal, or by running it.

        Raises:
            BudgetSpent: nothing is left to spend.
            ModelUnreachable: the model or its API gave no answer.
        """
        key = job_key(job)
        known = next(
            (item for item in reversed(self._journal.jobs()) if (item.name, item.key) == (job.name, key)), None
        )
        cut_off = known if known is not None and (known.status == "running" or known.short) else None
        if known is not None and cut_off is None and known.stop not in _PASSING:
            self.say(f"{job.name}: paid for already ({known.cost_usd:.4f} USD)")
            return known.result()
        reserved = self.budget.reserve(job.budget_usd, job.name)
        record = cut_off or JobRecord(
            name=job.name, key=key, status="running", session_id=str(uuid.uuid4()), transcript=self._transcript(job)
        )
        before, cost = record.cost_usd, 0.0
        try:
            self._journal.put(record)
            result = await self._run(replace(job, budget_usd=reserved), record, resumed=cut_off is not None)
            # a session's cost counts all of it: what an earlier process spent on it is known already
            cost = max(0.0, result.cost_usd - before)
            record = record.ended(result, short=result.stop is Stop.BUDGET and reserved < job.budget_usd)
            self._journal.put(record)
        finally:
            self.budget.settle(reserved, cost)
        self.say(_line(job, result, self.budget))
        if record.short:
            raise BudgetSpent(
                f"the budget of {self.budget.total_usd:.2f} USD ended {job.name} ({self.budget.spent_usd:.4f} spent)",
                field="--budget-usd",
                remedy="Run again with a larger budget: it goes on from there.",
            )
        if result.stop in _PASSING:
            raise ModelUnreachable(
                f"{job.name}: {result.stop.value}: {result.error or 'no more is known'}",
                where=record.transcript,
                remedy="The same command goes on from here.",
            )
        return result

    async def _run(self, job: Job, record: JobRecord, *, resumed: bool) -> JobResult:
        clock = time.monotonic()
        transcript = Path(record.transcript)
        transcript.parent.mkdir(parents=True, exist_ok=True)
        result = await self.backend.run(job, Session(record.session_id, resumed), transcript)
        return replace(result, transcript=record.transcript, seconds=time.monotonic() - clock)

    def _transcript(self, job: Job) -> str:
        stem = re.sub(r"\W+", "_", job.name).strip("_")
        taken = {item.transcript for item in self._journal.jobs()}
        names = (
            str(self._folder / f"{stem}{number}.jsonl") for number in ("", *(f"_{count}" for count in range(2, 99)))
        )
        return next(name for name in names if name not in taken)


def job_key(job: Job) -> str:
    """Hash of what is asked: prompts, tools, schema, model and stamp, not of limits."""
    told = [job.prompt, job.system, job.access.tools, job.access.writable, job.schema, job.model, job.stamp]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _line(job: Job, result: JobResult, budget: Budget) -> str:
    said = f"{job.name}: {result.stop.value}, {result.turns} turns, {result.tokens.total} tokens"
    said += f", {result.cost_usd:.4f} USD"
    if result.denials:
        said += f", {len(result.denials)} calls refused"
    of = f" of {budget.total_usd:.2f}" if budget.total_usd is not None else ""
    return f"{said} ({result.seconds:.1f} s; {budget.spent_usd:.4f}{of} USD in all)"
