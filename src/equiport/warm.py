"""Fresh processes that need not import their libraries: forked from a server that has done nothing else.

Importing torch and transformers takes three to six seconds of a core; an experiment starts some twenty processes. Each
is still a process of its own: what one does to modules, environment or threads no other sees.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from equiport.errors import EquiportError

# modules that component tests need, and those that stages and unit tests need
FOR_TESTS = ("torch", "equiport.stages.component_check", "pytest")
FOR_STAGES = (*FOR_TESTS, "transformers.models.llama.modeling_llama", "equiport.cli.entry", "equiport.stages.frame")

_SERVERS: dict[tuple[str, tuple[str, ...]], WarmServer] = {}
_LOCK = threading.Lock()


@dataclass
class _Lines:
    """Lines of a status pipe, read with a time limit."""

    descriptor: int
    read: bytes = b""

    def next(self, timeout: float | None) -> bytes:
        """The next line.

        Raises:
            subprocess.TimeoutExpired: no whole line within `timeout` seconds; nothing is lost.
            EquiportError: the pipe ended.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self.read:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self.descriptor], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            part = os.read(self.descriptor, 4096)
            if not part:
                self.close()
                raise _gone("its supervisor ended")
            self.read += part
        line, _, self.read = self.read.partition(b"\n")
        return line

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


@dataclass
class WarmJob:
    """A running process. `pid` leads a process group of its own where it was started in a new session."""

    pid: int
    _status: _Lines

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; may be asked again after a timeout.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
            EquiportError: its supervisor was killed.
        """
        code = int(self._status.next(timeout))
        self._status.close()
        return code

    def kill(self) -> None:
        """Kill it, and with a session of its own what it started, and wait for its end."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(EquiportError):
            self.wait()


@dataclass
class WarmServer:
    """A server for one interpreter and one list of modules to import. Started at the first job, or by `start`."""

    python: str
    modules: tuple[str, ...]
    _process: subprocess.Popen[bytes] | None = None
    _channel: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start the server where it does not run; returns at once, the imports go on."""
        with self._lock:
            self._started()

    def run(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        stdout: int = 1,
        stderr: int = 2,
        new_session: bool = False,
    ) -> WarmJob:
        """Start `python argv...` (a script or `-m module`) with these variables; stdin is empty.

        `stdout`, `stderr`: descriptors. `new_session`: what it starts is killed when it ends.

        Raises:
            EquiportError: the server does not answer.
        """
        message = {
            "argv": list(argv), "cwd": str(cwd), "environment": dict(environment), "new_session": new_session,
        }  # fmt: skip
        body = json.dumps(message).encode()
        read, write = os.pipe()
        try:
            with self._lock:
                channel = self._started()
                socket.send_fds(channel, [len(body).to_bytes(4, "big")], [write, stdout, stderr])
                channel.sendall(body)
        except OSError as error:
            os.close(read)
            raise _gone(str(error)) from None
        finally:
            os.close(write)
        status = _Lines(read)
        return WarmJob(int(status.next(None)), status)

    def stop(self) -> None:
        """End the server; running jobs go on."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
            if self._process is not None:
                self._process.wait()
            self._process, self._channel = None, None

    def _started(self) -> socket.socket:
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return self._channel
        ours, theirs = socket.socketpair()
        command = [self.python, "-m", "equiport.warm_server", str(theirs.fileno()), *self.modules]
        # passive waiting: spinning threads are ruinous where cores are shared
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore", **os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._channel = ours
        return ours


def warm_server(modules: tuple[str, ...], python: str = sys.executable) -> WarmServer:
    """The server of this process for an interpreter and a list of modules; it ends with this process."""
    with _LOCK:
        return _SERVERS.setdefault((python, modules), WarmServer(python, modules))


@atexit.register
def _stop_all() -> None:
    for server in _SERVERS.values():
        server.stop()


def _gone(why: str) -> EquiportError:
    return EquiportError(
        f"a process could not be started or was lost: {why}",
        remedy="Often the memory did not suffice. The same command goes on from here.",
    )
