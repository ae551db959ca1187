"""Limits of a process that runs audited code: time, memory, files, and no network. Called before anything is loaded."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NEWNET, _NEWUSER = 0x40000000, 0x10000000
_LOCAL = ("127.", "::1", "localhost", "0.0.0.0", "::")
_LEAVING = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(memory_mb: int, seconds: float) -> None:
    """Limit address space, processor time, file sizes and core files of this process and those it forks."""
    _lower(resource.RLIMIT_AS, memory_mb << 20)
    _lower(resource.RLIMIT_CPU, max(1, int(seconds)))
    _lower(resource.RLIMIT_FSIZE, 256 << 20)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def cut_network() -> str:
    """Leave the network's namespace where the system allows it. Returns how far that went.

    Only while one thread runs. A lone loopback stays: stacks start their process groups over it.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWNET) and libc.unshare(_NEWUSER | _NEWNET):
            return "refused in Python"
        _raise_loopback()
    except (OSError, AttributeError):
        return "refused in Python"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return "a namespace of its own"


def _raise_loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        name = struct.pack("16sh", b"lo", 1)
        fcntl.ioctl(handle, 0x8914, name)  # SIOCSIFFLAGS: up


def refuse(writable: Sequence[Path]) -> None:
    """From here on: no connections but local ones, no other programs, no writing outside `writable` folders.

    Cannot be undone in this process. A refusal is a PermissionError where it happens, so that a test fails by it.
    """
    roots = tuple(str(path.resolve()) for path in writable)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            _check_open(arguments, roots)
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            if not str(arguments[1][0]).startswith(_LOCAL):
                raise PermissionError(f"no network while the audit runs: {arguments[1][0]}")
        elif event == "socket.getaddrinfo":
            host = str(arguments[0] or "localhost")
            if not host.startswith(_LOCAL) and host != socket.gethostname():
                raise PermissionError(f"no network while the audit runs: {host}")
        elif event.startswith(_LEAVING):
            raise PermissionError(f"no other programs while the audit runs: {event}")
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"):
            _check_path(arguments[0], roots)

    sys.addaudithook(watch)


def _check_open(arguments: tuple[Any, ...], roots: tuple[str, ...]) -> None:
    path, mode, flags = arguments
    writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
    if writes:
        _check_path(path, roots)


def _check_path(path: Any, roots: tuple[str, ...]) -> None:
    if isinstance(path, int):
        return
    whole = os.path.realpath(os.fsdecode(path))
    if not whole.startswith((*roots, "/dev/")):
        raise PermissionError(f"no writing outside of the audit's scratch folder: {whole}")
