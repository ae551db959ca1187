"""AgentTranslator: a unit's block file and test, written by an agent in a folder of its own and believed by nobody.

The agent's word counts for nothing: the toolkit audits its files, runs its test, builds the block at its place in the
assembled model, and tests it there with a test of its own. What is rejected goes back with the reason in front.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from equiport.agents.backend import Access, Job, JobResult, Stop
from equiport.agents.prompts import load_prompt
from equiport.agents.sessions import Sessions, job_key
from equiport.errors import EquiportError, ExitCode
from equiport.port.agent_limits import MOST_PARALLEL, AgentLimits
from equiport.port.made_unit import MadeUnit, places_of
from equiport.port.plan_schema import PortPlan, PortUnit
from equiport.port.port_run_units import UnitTest, audit_unit, run_unit_test, write_toolkit
from equiport.port.translate import BLOCK_FILE, TEST_FILE, UnitFiles, UnitRequest
from equiport.port.translate_prompt import cheated, failed, relaunched, source_file, unit_prompt
from equiport.port.translate_recipes import RecipeTranslator
from equiport.port.unit_attempts import Rejection, add_attempt, read_attempts
from equiport.port.unit_budget import UnitFailed, left_for
from equiport.port.unit_card import CARD_FILE
from equiport.port.unit_place import PLACE_TEST, UnitPlace
from equiport.port.unit_settle import Settled, settle
from equiport.stacks.loading import load_adapter

Ended = Callable[[UnitRequest, "MadeUnit | EquiportError", float], None]

_PROMPT = "nxdi-block-translator"
_TESTS_AT_ONCE = 2


@dataclass(frozen=True)
class _Judged:
    """What became of one attempt: the settled unit, or why it was rejected."""

    settled: Settled | None
    rejection: Rejection | None


class AgentTranslator:
    """Translates units whose blocks have a place in the assembled model, whether there are recipes for them or not."""

    name = "agent"

    def __init__(self, sessions: Sessions, limits: AgentLimits) -> None:
        self._sessions, self._limits = sessions, limits

    def can(self, plan: PortPlan, unit: PortUnit) -> tuple[str, ...]:
        """Why no agent can be asked for the unit: nothing of the assembled model would take it up."""
        if plan.fingerprint.route != "decoder":
            return (f"the assembled model is a decoder, not of route {plan.fingerprint.route}",)
        try:
            places_of(plan.fingerprint, unit)
        except EquiportError as error:
            return (error.line(),)
        return ()

    def translate(self, request: UnitRequest) -> UnitFiles:
        """The files of one unit, accepted.

        Raises:
            UnitFailed: no attempt was accepted, or the unit's budget is spent.
            EquiportError: the model cannot be asked.
        """
        made = asyncio.run(self.make(request))
        return UnitFiles(made.source, (request.folder / TEST_FILE).read_text(encoding="utf-8"))

    def translate_all(self, requests: Sequence[UnitRequest], ended: Ended) -> list[MadeUnit | EquiportError]:
        """Several units side by side. The failure of one does not stop the others: it stands in its place. `ended` is
        told of each as soon as it has ended."""
        return asyncio.run(self._all(requests, ended))

    async def _all(self, requests: Sequence[UnitRequest], ended: Ended) -> list[MadeUnit | EquiportError]:
        gate = asyncio.Semaphore(max(1, min(self._limits.parallel, MOST_PARALLEL)))
        tests = asyncio.Semaphore(_TESTS_AT_ONCE)

        async def one(request: UnitRequest) -> MadeUnit | EquiportError:
            async with gate:
                clock = time.monotonic()
                result: MadeUnit | EquiportError
                try:
                    result = await self.make(request, tests)
                except EquiportError as error:
                    result = error
                ended(request, result, time.monotonic() - clock)
                return result

        return list(await asyncio.gather(*(one(request) for request in requests)))

    async def make(self, request: UnitRequest, tests: asyncio.Semaphore | None = None) -> MadeUnit:
        """Have a unit made: attempts until one is accepted.

        Raises:
            UnitFailed: see `translate`.
        """
        gate = tests or asyncio.Semaphore(1)
        place = UnitPlace(request)
        write_toolkit(request.folder.parent)
        place.write_beside()
        access = self._access(request)
        prompt = unit_prompt(request, place, RecipeTranslator().example(request), access.readable)
        key = job_key(Job("", prompt, load_prompt(_PROMPT).text, access, 0.0, 0, model=self._limits.model))
        attempts = read_attempts(request.folder, key, (BLOCK_FILE, TEST_FILE, CARD_FILE, PLACE_TEST))
        while len(attempts.rejected) < self._limits.attempts:
            number = len(attempts.rejected) + 1
            task = prompt if number == 1 else relaunched(prompt, number, attempts.rejected[-1].instruction)
            ended = await self._sessions.run(self._job(request, number, task, access))
            judged = await self._judge(request, place, ended, gate)
            if judged.settled is not None:
                return MadeUnit(request.unit, judged.settled.block, judged.settled.card)
            assert judged.rejection is not None
            attempts = add_attempt(request.folder, attempts, judged.rejection)
            self._sessions.say(f"unit {request.unit.id}, attempt {number}: rejected: {judged.rejection.line}")
        last = attempts.rejected[-1]
        raise UnitFailed(
            f"unit {request.unit.id}: none of {len(attempts.rejected)} attempts was accepted, the last: {last.line}",
            where=last.log or str(request.folder),
            remedy="Raise --attempts to have it tried again, or translate the unit by hand.",
        )

    def _access(self, request: UnitRequest) -> Access:
        roots = [source_file(cls).parent for cls in request.unit.sources]
        roots += load_adapter(request.plan.stack).source_roots()
        tools = tuple(tool for tool in load_prompt(_PROMPT).tools if tool in ("Read", "Write", "Edit"))
        return Access(
            request.folder,
            tools,
            (BLOCK_FILE, TEST_FILE, CARD_FILE),
            tuple(dict.fromkeys(root.resolve() for root in roots)),
        )

    def _job(self, request: UnitRequest, number: int, task: str, access: Access) -> Job:
        return Job(
            name=f"unit {request.unit.id}, attempt {number}",
            prompt=task,
            system=load_prompt(_PROMPT).text,
            access=access,
            budget_usd=left_for(request.unit.id, request.folder, self._sessions, self._limits),
            max_turns=self._limits.turns,
            timeout=self._limits.timeout,
            model=self._limits.model,
        )

    async def _judge(
        self, request: UnitRequest, place: UnitPlace, ended: JobResult, tests: asyncio.Semaphore
    ) -> _Judged:
        """Audit, the agent's test, and the toolkit's: each in its turn, the first fault rejects."""
        folder, unit = request.folder, request.unit
        lacking = [name for name in (BLOCK_FILE, TEST_FILE) if not (folder / name).is_file()]
        if lacking:
            why = f"the agent ended ({ended.stop.value}) without {' and '.join(lacking)}"
            return _rejected(why, f"You ended without writing {' and '.join(lacking)}. Write both files first.")
        async with tests:
            # what the agent was shown is not what is believed: written anew before each test
            write_toolkit(folder.parent)
            place.write_beside()
            (folder / PLACE_TEST).unlink(missing_ok=True)
            refused = await asyncio.to_thread(audit_unit, folder.parent, unit.id)
            if refused is not None:
                return _rejected(refused.line, cheated(refused.line, unit.sources), refused.log)
            test = await asyncio.to_thread(run_unit_test, folder.parent, unit.id)
            if not test.passed:
                return _rejected(_ended(ended, test), failed(test.line, test.log), test.log)
        try:
            settled = await settle(request, place, self._sessions, self._limits, tests)
        except EquiportError as error:
            if error.exit_code is ExitCode.PREREQUISITE:
                raise
            log = Path(error.where) if error.where else None
            text = (
                failed(error.what, log) if log is not None and log.is_file() else f"{error.line()}. Correct your files."
            )
            return _rejected(error.line(), text, log)
        return _Judged(settled, None)


def _rejected(line: str, instruction: str, log: Path | None = None) -> _Judged:
    return _Judged(None, Rejection(line=line, instruction=instruction, log=str(log) if log else ""))


def _ended(ended: JobResult, test: UnitTest) -> str:
    return test.line if ended.stop is Stop.DONE else f"{test.line} (the agent ended by: {ended.stop.value})"
