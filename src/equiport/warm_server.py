"""The process behind `equiport.warm`: imports libraries once, then forks a process for every job.

`python -m equiport.warm_server FD MODULE...`: FD is a socket; each message is four bytes of length, a JSON object
`{"argv", "cwd", "environment", "new_session"}` and three descriptors: the job's status pipe, its stdout, its stderr.
A supervisor writes the job's pid and then its exit code, a line each, into the status pipe.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass

_DESCRIPTORS = 3


@dataclass(frozen=True)
class _Job:
    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    new_session: bool
    status: int
    stdout: int
    stderr: int


def main() -> None:
    """Serve until the other end closes; in a job's own process, run the job and end as Python ends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the jobs and for who asked for them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors leave no zombies
    for name in sys.argv[2:]:
        with suppress(ImportError):
            importlib.import_module(name)
    job = _serve(channel)
    if job is not None:
        _run(job)


def _serve(channel: socket.socket) -> _Job | None:
    """The job to run, in its process; None in the server, at the end."""
    while True:
        job = _receive(channel)
        if job is None:
            return None
        if os.fork() == 0:
            channel.close()
            return _supervised(job)
        for descriptor in (job.status, job.stdout, job.stderr):
            os.close(descriptor)


def _receive(channel: socket.socket) -> _Job | None:
    size, descriptors, _, _ = socket.recv_fds(channel, 4, _DESCRIPTORS)
    if len(size) < 4:
        return None
    left, parts = int.from_bytes(size, "big"), []
    while left:
        part = channel.recv(left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    said = json.loads(b"".join(parts))
    return _Job(tuple(said["argv"]), said["cwd"], said["environment"], said["new_session"], *descriptors)


def _supervised(job: _Job) -> _Job:
    """Fork the job's process; this one reports on it and is gone when it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(job.status)
        return job
    os.close(job.stdout)
    os.close(job.stderr)
    with suppress(OSError):
        os.write(job.status, f"{pid}\n".encode())
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if job.new_session:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what the job started ends with it; its pid is still its own
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        os.write(job.status, f"{code}\n".encode())
    os._exit(0)


def _run(job: _Job) -> None:
    if job.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(job.stdout, 1)
    os.dup2(job.stderr, 2)
    os.close(job.stdout)
    os.close(job.stderr)
    os.chdir(job.cwd)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(job.environment)
    if os.environ.get("OMP_NUM_THREADS", threads) != threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # was read when torch was loaded
    added = [path for path in job.environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in before]
    sys.path[1:1] = added
    sys.dont_write_bytecode = bool(job.environment.get("PYTHONDONTWRITEBYTECODE"))
    if job.argv[0] == "-m":
        sys.argv = list(job.argv[1:])
        sys.path[0] = job.cwd
        runpy.run_module(job.argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(job.argv)
        sys.path[0] = os.path.dirname(os.path.abspath(job.argv[0]))
        runpy.run_path(job.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
