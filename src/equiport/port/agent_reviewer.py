"""A review of a finished port by an agent that is told paths and nothing else. Its findings change no verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from equiport.agents.backend import Access, Job
from equiport.agents.prompts import load_prompt
from equiport.agents.sessions import Sessions
from equiport.experiment import Experiment
from equiport.experiment.hashing import sha256
from equiport.port.agent_limits import AgentLimits
from equiport.port.unit_settle import typed
from equiport.report.advisory import AdvisoryFinding, AdvisoryReview, write_advisory

_AGENT = "port-auditor"


class Review(BaseModel):
    """What a reviewer answers."""

    model_config = ConfigDict(extra="forbid")

    findings: list[AdvisoryFinding]


def review(
    experiment: Experiment, port: Path, source: Path, folder: Path, sessions: Sessions, limits: AgentLimits
) -> AdvisoryReview | None:
    """Have the port reviewed and the findings stored; None where there was no answer of the form.

    Raises:
        EquiportError: the model cannot be asked.
    """
    prompt = load_prompt(_AGENT)
    folder.mkdir(parents=True, exist_ok=True)
    paths = (port.parent.resolve(), experiment.root, source.parent.resolve())
    task = "\n".join(
        [
            "Job: review a port.",
            f"The port: {port.resolve()}",
            f"The source: {source}",
            f"The experiment: {experiment.root}",
        ]
    )
    job = Job(
        "review, attempt 1", task, prompt.text, Access(folder, prompt.tools, (), paths), limits.unit_usd, limits.turns,
        limits.timeout, Review.model_json_schema(), limits.model, sha256(port),
    )  # fmt: skip
    ended = asyncio.run(sessions.run(job))
    answer = typed(Review, ended.structured) if ended.done else ended.stop.value
    if not isinstance(answer, Review):
        sessions.say(f"review: no usable answer: {answer}")
        return None
    made = AdvisoryReview(reviewer=f"the agent {_AGENT}", findings=tuple(answer.findings))
    write_advisory(experiment, made)
    return made
