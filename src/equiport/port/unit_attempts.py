"""Attempts at a task, kept in its folder: what was rejected and why, so that an interrupted port goes on with the next
one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from equiport.experiment.atomic import read_json, write_json

ATTEMPTS_FILE = "attempts.json"


class Rejection(BaseModel):
    """One attempt that was rejected. `instruction`: what the next one is told; `line`: the same for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    line: str
    instruction: str
    log: str = ""


class Attempts(BaseModel):
    """The rejected attempts at one task; `key` is the hash of the task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    rejected: tuple[Rejection, ...] = ()


def read_attempts(folder: Path, key: str, files: Iterable[str]) -> Attempts:
    """The attempts at this very task. Where the folder holds those of another one, `files` of it are removed."""
    path = folder / ATTEMPTS_FILE
    try:
        found = Attempts.model_validate(read_json(path)) if path.is_file() else None
    except ValidationError:
        found = None
    if found is not None and found.key == key:
        return found
    for name in files:
        (folder / name).unlink(missing_ok=True)
    begun = Attempts(key=key)
    write_json(path, begun)
    return begun


def add_attempt(folder: Path, attempts: Attempts, rejection: Rejection) -> Attempts:
    """Write down one more rejection."""
    made = Attempts(key=attempts.key, rejected=(*attempts.rejected, rejection))
    write_json(folder / ATTEMPTS_FILE, made)
    return made
