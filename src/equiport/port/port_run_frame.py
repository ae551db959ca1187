"""What the phases of a port share: what was asked, the state, the agents' sessions, and how a step is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from equiport.agents.sessions import Sessions
from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode
from equiport.port.agent_limits import AgentLimits
from equiport.port.state import StateFile, key_of

ENGINES = ("recipes", "agent", "auto")
#: Folder of what agents leave: transcripts, conversations, their work outside units.
AGENTS = "agents"


@dataclass(frozen=True)
class PortOptions:
    """What `equiport port` was given. `patch`, `review`: whether agents may patch a failing port, and review it."""

    model: Path
    out: Path
    stack: str = "nxdi"
    engine: str = "recipes"
    answers: Path | None = None
    exp_dir: Path | None = None
    through: int | None = None
    quiet: bool = False
    debug: bool = False
    limits: AgentLimits = AgentLimits()
    patch: bool = True
    review: bool = True

    @property
    def experiment(self) -> Path:
        """Where the experiment goes."""
        return self.exp_dir or self.out / "exp"


@dataclass
class PortRun:
    """One run: what was asked, the state, and what the phases have made so far."""

    options: PortOptions
    state: StateFile
    sessions: Sessions | None = None

    def say(self, text: str) -> None:
        """One line on the screen."""
        if not self.options.quiet:
            print(text, flush=True)

    def step(self, name: str, key: str, make: Callable[[], tuple[Iterable[Path], str]]) -> None:
        """Take a step unless it is done; a step that raises is recorded as failed."""
        if self.state.is_done(name, key):
            self.say(f"{name}: up to date")
            return
        clock = time.monotonic()
        try:
            outputs, detail = make()
        except EquiportError as error:
            # bad input leaves nothing behind in a folder that is not a port's yet
            if self.state.begun or error.exit_code is not ExitCode.BAD_INPUT:
                self.state.failed(name, key, time.monotonic() - clock, error.line())
            raise
        seconds = time.monotonic() - clock
        self.state.done(name, key, outputs, seconds, detail)
        self.say(f"{name}: {detail} ({seconds:.1f} s)")


class PortFailed(EquiportError):
    """The port was made and is wrong."""

    exit_code = ExitCode.FAIL


def folder_key(kind: str, stack: str) -> str:
    """Hash of a stack's templates of one kind."""
    folder = content_dir("templates") / kind / stack
    return key_of([[path.relative_to(folder).as_posix(), path] for path in sorted(folder.rglob("*")) if path.is_file()])
