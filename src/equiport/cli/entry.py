"""How every command ends: one clear line for what a user can mend, the documented exit codes, no traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from equiport.errors import EquiportError, ExitCode

INTERRUPTED = 130  # what shells give for Ctrl-C
# set while a command runs: what it starts leaves the word about an interruption to it
_RUNNING = "EQUIPORT_RUNNING"


def run_command(action: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run `action`, print its error as one line, exit with its code; 130 after Ctrl-C."""
    outer = os.environ.get(_RUNNING)
    os.environ[_RUNNING] = str(os.getpid())
    try:
        code = int(action())
    except EquiportError as error:
        code = _report(str(error), int(error.exit_code), debug)
    except KeyboardInterrupt:
        code = INTERRUPTED
        if outer is None:
            _report("interrupted. What is done is kept; the same command goes on from there.", code, debug)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        text = f"{file}{error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += ". Free some disk space; nothing half-written is taken for a result."
        else:
            text += ". Check the path and its permissions, or add --debug for the traceback."
        code = _report(text, int(ExitCode.BAD_INPUT), debug)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        code = _report(
            f"internal error: {type(error).__name__}: {text}. Add --debug for the traceback.",
            int(ExitCode.BAD_INPUT),
            debug,
        )
    finally:
        os.environ.pop(_RUNNING)
        if outer is not None:
            os.environ[_RUNNING] = outer
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        # process groups of a serving stack may hang interpreter shutdown
        os._exit(code)
    raise SystemExit(code)


def _report(line: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"equiport: {line}", file=sys.stderr)
    return code
