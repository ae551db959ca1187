"""Run the corpus: cases side by side in processes, figures and a plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from equiport.bench.portbugs.corpus import CaseResult, corpus
from equiport.bench.portbugs.operator import Defect
from equiport.bench.portbugs.table import PortBugsTable
from equiport.errors import EquiportError

#: Not one that the corpus or the hypotheses were developed with.
DEFAULT_SEED = 1042
_POLL = 0.5


@dataclass(frozen=True)
class PortBugsBench:
    """What to run: all operators, the quick handful, or those whose name holds `only`."""

    quick: bool = False
    only: str = ""
    jobs: int = 2
    seed: int = DEFAULT_SEED


def chosen(bench: PortBugsBench) -> tuple[Defect, ...]:
    """The operators of a run, those of a family together.

    Raises:
        EquiportError: none.
    """
    found = [one for one in corpus() if bench.only.lower() in one.name.lower() and (one.quick or not bench.quick)]
    if not found:
        raise EquiportError(f"no bug's name holds {bench.only!r}", field="--only", remedy="Give a part of a name.")
    return tuple(sorted(found, key=lambda one: one.family))


def run_portbugs(bench: PortBugsBench, say: Callable[[CaseResult], None] = lambda _: None) -> PortBugsTable:
    """Judge every chosen case; `say` is told each when it is there.

    Raises:
        EquiportError: nothing is chosen.
    """
    operators = chosen(bench)
    cases: list[CaseResult] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="equiport-portbugs-") as work:
        shares = [operators[number :: bench.jobs] for number in range(max(1, bench.jobs))]
        files = [Path(work) / f"{number}.jsonl" for number in range(len(shares))]
        started = [_start(file, bench.seed, share) for file, share in zip(files, shares, strict=True) if share]
        read = {file: 0 for file in files}
        try:
            alive = True
            while alive:
                alive = any(process.poll() is None for process in started)
                for file in files:
                    for line in _new_lines(file, read):
                        if "error" in line:
                            failed[str(line["operator"])] = str(line["error"])
                            continue
                        cases.append(CaseResult.model_validate(line))
                        say(cases[-1])
                if alive:
                    time.sleep(_POLL)
        finally:
            for process in started:
                process.kill()
                process.wait()
        said = "; ".join(dict.fromkeys(_last_words(file) for file in files))
    there = {case.operator for case in cases} | set(failed)
    failed.update({one.name: f"its process ended: {said}" for one in operators if one.name not in there})
    return PortBugsTable(seed=bench.seed, quick=bench.quick, versions=_versions(), cases=cases, failed=failed)


def _start(file: Path, seed: int, share: Sequence[Defect]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "equiport.bench.portbugs.worker", str(file), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    # a session of its own: on a shared machine each worker then gets its share
    with open(file.with_suffix(".err"), "wb") as errors:
        return subprocess.Popen(
            [*command, *(one.name for one in share)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _last_words(file: Path) -> str:
    """The last line that a worker wrote on its error stream."""
    errors = file.with_suffix(".err")
    lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() if errors.is_file() else []
    return lines[-1] if lines else "without a word"


def _new_lines(file: Path, read: dict[Path, int]) -> list[dict[str, object]]:
    """Whole lines that were not read yet."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    new, read[file] = lines[read[file] :], len(lines)
    return [json.loads(line) for line in new]


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "transformers")}


def plot_portbugs(table: PortBugsTable, file: Path) -> Path:
    """Bars of the bugs that each gate sees, and of the controls that it flags.

    Raises:
        EquiportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EquiportError("matplotlib is missing", field="--output", remedy="pip install matplotlib") from error
    found = table.summary()
    names = ["equiport", *(row.gate for row in found.gates)]
    seen = [(found.detected, found.detected), *((row.default, row.perturbed) for row in found.gates)]
    alarms = [
        (found.false_alarms, found.false_alarms),
        *((row.default_alarms, row.perturbed_alarms) for row in found.gates),
    ]
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, title in zip(
        figure.subplots(1, 2, sharey=True), (seen, alarms), ("bugs seen, %", "correct rewrites flagged, %"), strict=True
    ):
        for column, (label, colour) in enumerate((("default weights", "#bbbbbb"), ("perturbed weights", "#1f77b4"))):
            places = [place + 0.2 - 0.4 * column for place in range(len(names))]
            shares = [pair[column] for pair in values]
            widths = [100 * share.count / max(1, share.total) for share in shares]
            axes.barh([-place for place in places], widths, height=0.38, label=label, color=colour)
        axes.set_yticks([-place for place in range(len(names))], names)
        axes.set_title(title)
        axes.set_xlim(0, 100)
    figure.axes[0].legend(loc="lower right")
    figure.suptitle(f"{len(table.cases)} ports, seed {table.seed}")
    figure.savefig(file, dpi=90)
    return file
