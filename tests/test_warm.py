"""Forked processes are fresh, report how they ended, and take with them what they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from equiport.errors import EquiportError
from equiport.warm import WarmJob, WarmServer

_MODULES = ("json", "tomllib_that_is_not_there")


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    made = WarmServer(sys.executable, _MODULES)
    yield made
    made.stop()


def _job(server: WarmServer, folder: Path, text: str, *, new_session: bool = True, **variables: str) -> WarmJob:
    script = folder / "job.py"
    script.write_text(text)
    with (folder / "log").open("wb") as log:
        return server.run(
            [str(script), "--flag"],
            environment={**os.environ, **variables},
            cwd=folder,
            stdout=log.fileno(),
            stderr=log.fileno(),
            new_session=new_session,
        )


def _log(folder: Path) -> str:
    return (folder / "log").read_text()


def test_a_job_sees_its_own_arguments_folder_and_variables(server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "given.py").write_text("NAME = 'given'")
    text = (
        "import os, sys, given\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['OWN'], __name__, 'json' in sys.modules, given.NAME)\n"
        "print(repr(sys.stdin.read()), os.path.dirname(sys.argv[0]) == sys.path[0], file=sys.stderr)\n"
    )
    assert _job(server, tmp_path, text, OWN="x", PYTHONPATH=str(tmp_path / "lib")).wait(30) == 0
    assert _log(tmp_path) == f"['--flag'] {tmp_path} x __main__ True given\n'' True\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import os; os._exit(5)", 5),
        ("raise ValueError('told')", 1),
        ("import sys; sys.exit('told')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_end_is_reported_as_python_reports_it(server: WarmServer, tmp_path: Path, text: str, code: int) -> None:
    assert _job(server, tmp_path, text).wait(30) == code
    assert ("told" in _log(tmp_path)) == ("told" in text)


def test_what_one_job_changes_no_other_sees(server: WarmServer, tmp_path: Path) -> None:
    spoil = (
        "import json, os, sys\njson.dumps = lambda *_: 'spoiled'\nos.environ['LEFT'] = '1'\nsys.path.insert(0, 'x')\n"
    )
    assert _job(server, tmp_path, spoil).wait(30) == 0
    look = "import json, os, sys\nprint(json.dumps(1), os.environ.get('LEFT'), 'x' in sys.path)\n"
    assert _job(server, tmp_path, look).wait(30) == 0
    assert _log(tmp_path) == "1 None False\n"


def test_atexit_handlers_run_and_output_is_whole(server: WarmServer, tmp_path: Path) -> None:
    text = "import atexit, sys\natexit.register(print, 'last')\nsys.stdout.write('x' * 10000)\n"
    assert _job(server, tmp_path, text).wait(30) == 0
    assert _log(tmp_path) == "x" * 10000 + "last\n"


def test_a_job_is_killed_with_what_it_started(server: WarmServer, tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
    )
    job = _job(server, tmp_path, text + "time.sleep(600)\n")
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(1.5)
    job.kill()
    assert _gone(int(_log(tmp_path)))
    assert _job(server, tmp_path, text).wait(30) == 0, "and when it ends by itself"
    assert _gone(int(_log(tmp_path)))


def test_an_interrupt_reaches_the_job_alone(server: WarmServer, tmp_path: Path) -> None:
    text = (
        "import time\nprint('up', flush=True)\n"
        "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    raise SystemExit(130)\n"
    )
    job = _job(server, tmp_path, text)
    while "up" not in _log(tmp_path):
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(30) == 130
    assert _job(server, tmp_path, "pass").wait(30) == 0


def test_a_job_cannot_write_its_own_verdict(server: WarmServer, tmp_path: Path) -> None:
    text = (
        "import os\nfor number in range(3, 256):\n    try:\n        os.write(number, b'0\\n0\\n')\n"
        "    except OSError:\n        pass\nos._exit(7)\n"
    )
    assert _job(server, tmp_path, text).wait(30) == 7


def test_a_server_that_died_is_started_again(tmp_path: Path) -> None:
    own = WarmServer(sys.executable, ("json",))
    assert _job(own, tmp_path, "pass").wait(30) == 0
    assert own._process is not None
    own._process.kill()
    own._process.wait()
    assert _job(own, tmp_path, "raise SystemExit(4)").wait(30) == 4
    own.stop()


def test_no_interpreter_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="could not be started"):
        _job(WarmServer("/bin/false", ()), tmp_path, "pass")


def _gone(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with open(f"/proc/{pid}/stat") as stat:  # a zombie that nobody waits for
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.02)
    return False
