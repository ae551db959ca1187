"""Open questions of a plan, answered by an agent: proposals that are checked like a person's, and never against one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from equiport.agents.backend import Access, Job
from equiport.agents.prompts import load_prompt
from equiport.agents.sessions import Sessions
from equiport.port.agent_limits import AgentLimits
from equiport.port.fingerprint import Fingerprint, OpenQuestion
from equiport.port.plan_schema import SourceClass
from equiport.port.translate_prompt import fenced, relaunched, source_file
from equiport.port.unit_settle import typed


class ProposedAnswer(BaseModel):
    """One answer with its reason."""

    model_config = ConfigDict(extra="forbid")

    id: str
    answer: str
    reason: str


class ProposedAnswers(BaseModel):
    """What the planner answers."""

    model_config = ConfigDict(extra="forbid")

    answers: list[ProposedAnswer]


@dataclass(frozen=True)
class Proposal:
    """Answers by question id, and the reasons for them."""

    answers: Mapping[str, str]
    reasons: Mapping[str, str]


def propose_answers(
    found: Fingerprint, asked: tuple[OpenQuestion, ...], sessions: Sessions, limits: AgentLimits, folder: Access
) -> Proposal:
    """Proposals for `asked`, which holds no question that a person has answered. `folder`: where the agent stands.

    Raises:
        EquiportError: the model cannot be asked.
    """
    prompt = load_prompt("planner")
    file = source_file(SourceClass(cls=found.architecture, file=found.source_file, line=1, path=""))
    lines = [f"Job: open questions of {found.architecture}.", f"Its modeling source: {file}", ""]
    for question in asked:
        lines += [
            f"Question {question.id}: {question.question}",
            *(f"- evidence: {text}" for text in question.evidence),
            f"- accepted answers: {', '.join(question.choices) or 'free text'}",
        ]
    task = fenced("\n".join(lines), "questions")
    task = f"{lines[0]}\n\n{task}"
    for number in range(1, limits.attempts + 1):
        job = Job(
            name=f"planner, attempt {number}",
            prompt=task,
            system=prompt.text,
            access=Access(folder.workspace, prompt.tools, (), (file.parent.resolve(), *folder.readable)),
            budget_usd=limits.unit_usd,
            max_turns=limits.turns,
            timeout=limits.timeout,
            schema=ProposedAnswers.model_json_schema(),
            model=limits.model,
        )
        ended = asyncio.run(sessions.run(job))
        answer = typed(ProposedAnswers, ended.structured) if ended.done else f"there was no answer: {ended.stop.value}"
        faults = [answer] if isinstance(answer, str) else _faults(answer, asked)
        if not faults and isinstance(answer, ProposedAnswers):
            return Proposal(
                {item.id: item.answer for item in answer.answers}, {item.id: item.reason for item in answer.answers}
            )
        task = relaunched(task, number + 1, f"{'; '.join(map(str, faults))}.")
    return Proposal({}, {})


def _faults(given: BaseModel, asked: tuple[OpenQuestion, ...]) -> list[str]:
    assert isinstance(given, ProposedAnswers)
    questions = {question.id: question for question in asked}
    found = []
    for item in given.answers:
        question = questions.get(item.id)
        if question is None:
            found.append(f"nobody asks {item.id}")
        elif question.choices and item.answer not in question.choices:
            found.append(f"{item.answer!r} is no accepted answer to {item.id}")
    ids = [item.id for item in given.answers]
    return found + [f"{name} is answered twice" for name in sorted({name for name in ids if ids.count(name) > 1})]
