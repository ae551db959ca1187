"""Commands that benches run in processes of their own, on the stand-in or on the real packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from equiport.errors import EquiportError

_SOURCES = ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC")
_COMMAND = "from equiport.cli import main; main()"


def given_sources(nxdi: Path | None, nxd: Path | None) -> dict[str, str]:
    """The real packages' sources from flags, else from the environment; empty when there are none.

    Raises:
        EquiportError: one of the two is missing, or transformers is not of the version they need.
    """
    flags = (nxdi, nxd)
    found = {
        name: str(flag.absolute()) if flag else os.environ.get(name, "")
        for name, flag in zip(_SOURCES, flags, strict=True)
    }
    missing = [name for name, value in found.items() if not value]
    if len(missing) == len(_SOURCES):
        return {}
    if missing:
        raise EquiportError("one of the two sources is missing", field=missing[0], remedy="Give both, or none.")
    for name, value in found.items():
        if not Path(value).is_dir():
            raise EquiportError("no such folder", where=value, field=name, remedy="Give the repository's folder.")
    import transformers

    if not transformers.__version__.startswith("4.57."):
        raise EquiportError(
            f"the real packages need transformers 4.57.*, here is {transformers.__version__}",
            field=_SOURCES[0],
            remedy="Run the bench with an interpreter that has it, or unset the variables.",
        )
    return found


def run_equiport(arguments: Sequence[str], sources: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """An `equiport` command of this very code; see `run_python`."""
    return run_python(["-c", _COMMAND, *arguments], sources)


def run_python(arguments: Sequence[str], sources: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """This interpreter, with one thread, on the tier that `sources` give (empty: the stand-in)."""
    environment = {name: value for name, value in os.environ.items() if name not in _SOURCES}
    paths = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    environment |= {**sources, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    environment |= {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
