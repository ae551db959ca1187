"""port_state.json: which steps of a port are done, and from what. Written whole after every step.

A step that is done from the same inputs, and whose outputs still stand as it left them, is not repeated: after a crash,
Ctrl-C or a failed step the same command goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport import __version__
from equiport.agents.journal import JobRecord
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.experiment.hashing import sha256

STATE_NAME = "port_state.json"


class StepRecord(BaseModel):
    """One step: `key` is the hash of its inputs, `outputs` maps files (relative to the port's folder) to sha256."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["done", "failed"]
    key: str
    outputs: dict[str, str] = Field(default_factory=dict)
    seconds: float = 0.0
    detail: str = ""


class Costs(BaseModel):
    """What agents have cost so far, in all and by what the jobs were for (unit, phase)."""

    model_config = ConfigDict(extra="forbid")

    usd: float = 0.0
    tokens: int = 0
    usd_by_task: dict[str, float] = Field(default_factory=dict)
    tokens_by_task: dict[str, int] = Field(default_factory=dict)


class PortState(BaseModel):
    """All steps so far, in the order in which they were first taken."""

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = 1
    tool_version: str = __version__
    model: str = ""
    stack: str = ""
    engine: str = ""
    steps: dict[str, StepRecord] = Field(default_factory=dict)
    jobs: list[JobRecord] = Field(default_factory=list)
    costs: Costs = Costs()


class StateFile:
    """The state of one port folder; it is also the journal of the agents' jobs."""

    def __init__(self, folder: Path, *, model: Path, stack: str, engine: str) -> None:
        """Read the folder's state, or begin one.

        Raises:
            EquiportError: the file is damaged, or the folder belongs to another model or stack.
        """
        self.folder = folder
        self._path = folder / STATE_NAME
        self.state = _read(self._path) if self._path.is_file() else PortState()
        known = (self.state.model, self.state.stack)
        if self.state.model and known != (str(model), stack):
            raise EquiportError(
                f"holds a port of {known[0]} to {known[1]}",
                where=folder,
                field="--out",
                remedy="Choose another folder.",
            )
        self.state.model, self.state.stack, self.state.engine = str(model), stack, engine
        self.state.tool_version = __version__

    @property
    def begun(self) -> bool:
        """Whether the folder holds a state already."""
        return self._path.is_file()

    def is_done(self, step: str, key: str) -> bool:
        """Whether the step was done from these inputs and its outputs are unchanged."""
        record = self.state.steps.get(step)
        return (
            record is not None
            and record.status == "done"
            and record.key == key
            and all(
                (self.folder / name).is_file() and sha256(self.folder / name) == digest
                for name, digest in record.outputs.items()
            )
        )

    def done(self, step: str, key: str, outputs: Iterable[Path], seconds: float, detail: str = "") -> None:
        """Record a step and write the state."""
        digests = {path.relative_to(self.folder).as_posix(): sha256(path) for path in outputs}
        self._record(
            step, StepRecord(status="done", key=key, outputs=digests, seconds=round(seconds, 2), detail=detail)
        )

    def failed(self, step: str, key: str, seconds: float, detail: str) -> None:
        """Record a step that failed; it is taken again by the next run."""
        self._record(step, StepRecord(status="failed", key=key, seconds=round(seconds, 2), detail=detail))

    def jobs(self) -> tuple[JobRecord, ...]:
        """The agents' jobs, in the order in which they were begun."""
        return tuple(self.state.jobs)

    def put(self, record: JobRecord) -> None:
        """Add a job, or replace the record of its session, and write the state."""
        for place, known in enumerate(self.state.jobs):
            if (known.name, known.transcript) == (record.name, record.transcript):
                self.state.jobs[place] = record
                break
        else:
            self.state.jobs.append(record)
        self.state.costs = _costs(self.state.jobs)
        self._write()

    def _record(self, step: str, record: StepRecord) -> None:
        self.state.steps[step] = record
        self._write()

    def _write(self) -> None:
        write_json(self._path, self.state)


def _costs(jobs: Iterable[JobRecord]) -> Costs:
    costs = Costs()
    for job in jobs:
        task, tokens = job.name.partition(", attempt")[0], job.tokens_in + job.tokens_out + job.tokens_cached
        costs.usd = round(costs.usd + job.cost_usd, 6)
        costs.tokens += tokens
        costs.usd_by_task[task] = round(costs.usd_by_task.get(task, 0.0) + job.cost_usd, 6)
        costs.tokens_by_task[task] = costs.tokens_by_task.get(task, 0) + tokens
    return costs


def key_of(*parts: Any) -> str:
    """Hash of a step's inputs: JSON-able values, texts, and files by their content."""
    return hashlib.sha256(json.dumps([_plain(part) for part in parts], sort_keys=True).encode()).hexdigest()[:24]


def _plain(part: Any) -> Any:
    if isinstance(part, Path):
        return sha256(part) if part.is_file() else str(part)
    if isinstance(part, BaseModel):
        return part.model_dump(mode="json")
    if isinstance(part, Mapping):
        return {str(name): _plain(value) for name, value in part.items()}
    return [_plain(item) for item in part] if isinstance(part, (list, tuple)) else part


def _read(path: Path) -> PortState:
    try:
        return PortState.model_validate(read_json(path, remedy="Delete it to begin again."))
    except ValidationError as error:
        first = error.errors()[0]
        raise EquiportError(
            f"is no port state: {first['msg']}",
            where=path,
            field=".".join(str(part) for part in first["loc"]),
            remedy="Delete it to begin again.",
        ) from None
