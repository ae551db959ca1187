"""Ports that nobody here wrote, each through `equiport validate` against its HF counterpart, tiny and perturbed."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from equiport.bench.commands import run_equiport, run_python
from equiport.bench.fidelity import identity, port_files
from equiport.bench.port_check import PortCheck
from equiport.bench.port_table import ENDED, PortTable, PortVerdict, checked_verdict, read_verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json, write_text
from equiport.experiment.config import CONFIG_NAME
from equiport.intake.inspection import inspect_port
from equiport.intake.source import source_folder
from equiport.stacks.port_classes import PortClasses

# CPython before 3.11.8 counts the depth of ast.parse for all threads together, and stops with a SystemError
_ONE_READS = threading.Lock()


@dataclass(frozen=True)
class PortsBench:
    """What to run. `tree`: folder of ports, `<name>/src/modeling_*.py`. `ports`: names or patterns; empty: all.

    `sources`: the real packages' source folders by environment variable; empty: the stand-in. `models`: a folder whose
    `<name>/config.json` says what the counterpart of that port is. `work`: where models and experiments stay; None: a
    temporary folder. `jobs`: ports side by side. `quick`: stage 0, components, causes and logits alone.
    """

    tree: Path
    sources: Mapping[str, str]
    ports: tuple[str, ...] = ()
    models: Path | None = None
    work: Path | None = None
    jobs: int = 1
    quick: bool = False


def run_ports(bench: PortsBench, say: Callable[[PortVerdict], None] = lambda _: None) -> PortTable:
    """Inspect and validate each port; `say` is told each row when it is there.

    Raises:
        EquiportError: the tree holds no ports, or none of a name that was given.
    """
    files = port_files(bench.tree, bench.ports)
    kept = nullcontext(str(bench.work)) if bench.work else tempfile.TemporaryDirectory(prefix="equiport-ports-")
    with kept as root, ThreadPoolExecutor(bench.jobs) as pool:
        work = Path(root).absolute()
        rows: dict[Path, PortVerdict] = {}
        waiting = {pool.submit(_validated, file, work, bench): file for file in files}
        for done in as_completed(waiting):
            rows[waiting[done]] = done.result()
            say(rows[waiting[done]])
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return PortTable(tree=identity(bench.tree), versions=versions, rows=tuple(rows[file] for file in files))


def _validated(file: Path, work: Path, bench: PortsBench) -> PortVerdict:
    """One port, whatever becomes of it: bad input and open questions are rows too."""
    clock, folder = time.monotonic(), work / file.parents[1].name / file.stem
    name = f"{file.parents[1].name}/{file.stem.removeprefix('modeling_')}"
    row = PortVerdict(port=name, kind="", model_type="", verdict=ENDED[2])
    try:
        given = bench.models / file.parents[1].name / "config.json" if bench.models else None
        with _ONE_READS:
            seen = inspect_port(file, model=given if given and given.is_file() else None)
        row = row.model_copy(update={"kind": seen.kind.value, "model_type": seen.model_type or ""})
        if seen.obstacle or seen.classes is None or seen.tiny is None:
            return row.model_copy(update={"said": seen.obstacle or "; ".join(seen.not_validated)})
        model, exp = folder / "model", folder / "exp"
        if not (model / "config.json").is_file():
            source_folder(seen, model)
    except EquiportError as error:
        verdict = ENDED.get(int(error.exit_code), ENDED[2])
        return row.model_copy(update={"verdict": verdict, "said": error.line()})
    if bench.quick:
        return _checked(row, file, seen.classes, folder, bench)
    classes = seen.classes
    command = ["validate", "--port", str(file), "--model", str(model), "--out", str(exp), "--through", "6", "--quiet"]
    command += ["--inner-class", classes.inner, "--causal-class", classes.causal, "--config-class", classes.config]
    ended = run_equiport(command, bench.sources)
    said = ended.stdout + ended.stderr
    write_text(folder / "validate.log", said)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    row = row.model_copy(update={"seconds": round(time.monotonic() - clock, 1), "said": last})
    if ended.returncode in ENDED and "report:" not in said or not (exp / CONFIG_NAME).is_file():
        return row.model_copy(update={"verdict": ENDED.get(ended.returncode, "CRASH")})
    with _ONE_READS:
        return read_verdict(row, Experiment.open(exp))


def _checked(row: PortVerdict, file: Path, classes: PortClasses, folder: Path, bench: PortsBench) -> PortVerdict:
    """What the stages compute, in one process, without scripts, pytest and reports around it."""
    clock, out = time.monotonic(), folder / "check.json"
    out.unlink(missing_ok=True)
    words = [str(path) for path in (out, file, folder / "model", folder / "check")]
    names = [classes.inner, classes.causal, classes.config]
    ended = run_python(["-m", "equiport.bench.port_check", *words, *names], bench.sources)
    write_text(folder / "check.log", ended.stdout + ended.stderr)
    seconds = round(time.monotonic() - clock, 1)
    if not out.is_file():
        last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
        return row.model_copy(update={"verdict": "CRASH", "said": last, "seconds": seconds})
    check = PortCheck.model_validate(read_json(out))
    return checked_verdict(row.model_copy(update={"seconds": seconds}), check)
