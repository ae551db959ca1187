"""Run functions in forked children, several side by side, each with a time limit; what they return comes by a pipe."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A function that is run in a child with a function that sends a JSON object to the parent."""

    name: str
    run: Callable[[Callable[[dict[str, Any]], None]], None]


@dataclass
class _Child:
    task: Task
    pid: int
    pipe: int
    end: float
    data: bytes = field(default=b"")


@dataclass(frozen=True)
class Ended:
    """What a task sent, and how its process ended: ok, timeout or died."""

    task: Task
    lines: Lines
    how: str


def run_forked(tasks: Sequence[Task], *, workers: int, seconds: float, deadline: float) -> Iterator[Ended]:
    """Run the tasks in order, `workers` at a time, at most `seconds` each, none started after `deadline`.

    Times are of time.monotonic. Tasks that were not started are not returned.
    """
    waiting, running = list(tasks), {}  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < deadline:
            child = _start(waiting.pop(0), seconds)
            running[child.pipe] = child
        if not running:
            return
        soonest = min(child.end for child in running.values())
        ready, _, _ = select.select(list(running), [], [], max(0.0, min(0.5, soonest - time.monotonic())))
        for pipe in ready:
            piece = os.read(pipe, 1 << 16)
            running[pipe].data += piece
            if not piece:
                yield _ended(running.pop(pipe), "ok")
        for pipe in [pipe for pipe, child in running.items() if child.end < time.monotonic()]:
            child = running.pop(pipe)
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            yield _ended(child, "timeout")


def _start(task: Task, seconds: float) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    inward, outward = os.pipe()
    pid = os.fork()
    if pid:
        os.close(outward)
        return _Child(task, pid, inward, time.monotonic() + seconds)
    code = 1
    try:
        os.close(inward)
        task.run(lambda item: _send(outward, item))
        code = 0
    except BaseException as error:
        with suppress(BaseException):
            _send(outward, {"died": f"{type(error).__name__}: {error}"[:300]})
    finally:
        # nothing of the parent's is to run here
        os._exit(code)


def _send(pipe: int, item: dict[str, Any]) -> None:
    data = (json.dumps(item) + "\n").encode()
    while data:
        data = data[os.write(pipe, data) :]


def _ended(child: _Child, how: str) -> Ended:
    os.close(child.pipe)
    with suppress(ChildProcessError):
        _, status = os.waitpid(child.pid, 0)
        how = how if how != "ok" or os.waitstatus_to_exitcode(status) == 0 else "died"
    lines: Lines = []
    for line in child.data.decode("utf-8", "replace").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return Ended(child.task, lines, how)
