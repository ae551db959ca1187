"""Ports on the stand-in and on the real packages: how far their logits are apart.

Each port's HuggingFace counterpart is made tiny with drawn weights; on each tier the port loads it and gives the logits
of a ragged prefill and of decode steps. Every port and tier has a process of its own, with a time limit.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from equiport.bench import fidelity_run
from equiport.bench.fidelity_run import FAILED, PROMPTS, RAN, STEPS, Ended, SourceJob, TierJob
from equiport.bench.fidelity_table import Apart, FidelityRow, FidelityTable, TierEnd
from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.warm import FOR_STAGES, warm_server

_PATTERN = "*/src/modeling_*.py"
_VARIABLES = ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC")
# What a figure depends on: another state of these makes a kept one stale.
_ROOMS = ("fixtures", "intake", "reference", "stacks")
STAND_IN, REAL = "stand-in", "real-cpu"


@dataclass(frozen=True)
class FidelityBench:
    """What to run. `tree`: folder of ports; None: the contributed ones beside the real sources.

    `sources`: source folders by environment variable. `ports`: names or patterns; empty: all. `models`: a folder whose
    `<name>/config.json` says what the counterpart of that port is. `quick`: fp32 alone. `limit`: seconds a process.
    `work`: where everything goes and stays, so that a second run resumes; None: a temporary folder.
    """

    sources: Mapping[str, str]
    tree: Path | None = None
    ports: tuple[str, ...] = ()
    models: Path | None = None
    quick: bool = False
    work: Path | None = None
    limit: float = 180.0


def run_fidelity(bench: FidelityBench, say: Callable[[FidelityRow], None] = lambda _: None) -> FidelityTable:
    """Run every port on both tiers; `say` is told each row when it is there.

    Raises:
        EquiportError: no sources, no ports, or none of a name that was given.
    """
    if set(bench.sources) != set(_VARIABLES):
        raise EquiportError(
            "the bench compares with the real packages",
            field="--nxdi-src",
            remedy="Give --nxdi-src and --nxd-src, or set EQUIPORT_NXDI_SRC and EQUIPORT_NXD_SRC.",
        )
    tree = bench.tree or contributed(Path(bench.sources[_VARIABLES[0]]))
    files = port_files(tree, bench.ports)
    dtypes = ("float32",) if bench.quick else ("float32", "bfloat16")
    stand_in = identity(content_dir("adapters") / "nxdi")
    sources = {name: identity(Path(folder)) for name, folder in bench.sources.items()}
    runner = _Runner(bench, dtypes, {STAND_IN: stand_in, REAL: "; ".join([stand_in, *sources.values()])})
    rows = []
    kept = nullcontext(str(bench.work)) if bench.work else tempfile.TemporaryDirectory(prefix="equiport-fidelity-")
    with kept as root:
        for file in files:
            rows.append(runner.row(file, Path(root).absolute() / file.parents[1].name / file.stem))
            say(rows[-1])
    return FidelityTable(
        tree=identity(tree),
        sources=sources,
        stand_in=stand_in,
        versions={name: metadata.version(name) for name in ("torch", "transformers")},
        dtypes=dtypes,
        prompts=PROMPTS,
        decode_steps=STEPS,
        rows=tuple(rows),
    )


def contributed(nxdi: Path) -> Path:
    """The folder of contributed ports in the repository of which `nxdi` is the root or the src folder.

    Raises:
        EquiportError: there is none.
    """
    for root in (nxdi, nxdi.parent):
        if (root / "contrib" / "models").is_dir():
            return root / "contrib" / "models"
    raise EquiportError(
        "no contrib/models beside it", where=nxdi, field="--tree", remedy="Give the folder of ports with --tree."
    )


def port_files(tree: Path, wanted: Iterable[str] = ()) -> tuple[Path, ...]:
    """`<name>/src/modeling_*.py` below a tree, of the names or patterns that are wanted; all, if none is.

    Raises:
        EquiportError: there is none, or none of a name.
    """
    found = sorted(tree.absolute().glob(_PATTERN))
    if not found:
        raise EquiportError(f"no port matches {_PATTERN}", where=tree, remedy="Give the folder that holds the ports.")
    patterns = tuple(wanted)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(file.parents[1].name, pattern) for file in found):
            raise EquiportError(f"no port is called {pattern!r}", where=tree, field="--ports", remedy="Check the name.")
    return tuple(
        file for file in found if not patterns or any(fnmatch.fnmatch(file.parents[1].name, one) for one in patterns)
    )


def identity(folder: Path) -> str:
    """The commit of a folder that git tracks and that was not changed, else a digest of its Python files."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if git("ls-files", "--", "."):
        changed = git("status", "--porcelain", "--", ".")
        if not changed:
            return f"commit {git('rev-parse', 'HEAD')}"
    return f"content {_digest(sorted(folder.rglob('*.py')), folder)}"


def _digest(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class _Runner:
    """Runs the processes of ports, and takes what an earlier run with the same inputs has left."""

    def __init__(self, bench: FidelityBench, dtypes: tuple[str, ...], made_with: Mapping[str, str]) -> None:
        self.bench, self.dtypes, self.made_with = bench, dtypes, made_with
        versions = [metadata.version(name) for name in ("torch", "transformers")]
        package = Path(__file__).resolve().parents[1]
        code = [identity(package / room) for room in _ROOMS] + [_digest([Path(fidelity_run.__file__)], package)]
        self.common = "; ".join([*versions, *code])

    def row(self, file: Path, folder: Path) -> FidelityRow:
        """One port."""
        name = f"{file.parents[1].name}/{file.stem.removeprefix('modeling_')}"
        config = self.bench.models / file.parents[1].name / "config.json" if self.bench.models else None
        given = config if config is not None and config.is_file() else None
        key = "; ".join([self.common, identity(file.parent), given.read_text("utf-8") if given else ""])
        job = SourceJob(port=file, folder=folder / "model", model=given)
        source, _ = self._run("source", job, folder, "source", key, {})
        known = {"port": name, "kind": source.kind, "model_type": source.model_type}
        if source.status != RAN or source.classes is None:
            return FidelityRow(**known, obstacle=f"{source.phase}: {source.said}")
        tiers, ends = {}, {}
        for tier, sources in ((STAND_IN, {}), (REAL, dict(self.bench.sources))):
            work = TierJob(port=file, folder=job.folder, classes=source.classes, dtypes=self.dtypes)
            made = "; ".join([key, self.made_with[tier], *self.dtypes])
            end, seconds = self._run("tier", work, folder, tier, made, sources)
            if end.status == RAN and end.tier != tier:
                end = end.model_copy(update={"status": FAILED, "phase": "start", "said": f"it ran on {end.tier}"})
            ends[tier] = end
            tiers[tier] = TierEnd(seconds=seconds, **end.model_dump(include=set(TierEnd.model_fields)))
        return FidelityRow(**known, tiers=tiers, **self._figures(folder, ends, source.vocabulary))

    def _figures(self, folder: Path, ends: Mapping[str, Ended], vocabulary: int) -> dict[str, object]:
        if ends[REAL].status != RAN:
            return {}
        real = _logits(folder / f"{REAL}.safetensors", vocabulary)
        found: dict[str, object] = {"source": apart(real["float32"], _logits(folder / "source.safetensors")["float32"])}
        if ends[STAND_IN].status == RAN:
            own = _logits(folder / f"{STAND_IN}.safetensors", vocabulary)
            found["apart"] = {dtype: apart(own[dtype], real[dtype]) for dtype in self.dtypes}
        return found

    def _run(
        self, what: str, job: BaseModel, folder: Path, name: str, key: str, sources: Mapping[str, str]
    ) -> tuple[Ended, float]:
        """How the job ended and in how many seconds; from an earlier run if that was asked the same."""
        out, stamp = folder / f"{name}.json", folder / f"{name}.made.json"
        digest = hashlib.sha256(key.encode()).hexdigest()
        if out.is_file() and stamp.is_file():
            kept = read_json(stamp)
            if kept["made_with"] == digest:
                return Ended.model_validate(read_json(out)), kept["seconds"]
        for left in (out, stamp, out.with_suffix(".safetensors")):
            left.unlink(missing_ok=True)
        if what == "source":
            _forget(folder / "model")
        asked = write_json(folder / f"{name}.job.json", job)
        clock = time.monotonic()
        said = self._process([what, str(asked), str(out)], folder / f"{name}.log", sources)
        seconds = round(time.monotonic() - clock, 1)
        if not out.is_file():
            write_json(out, Ended(status=FAILED, phase="process", said=said))
        write_json(stamp, {"made_with": digest, "seconds": seconds})
        return Ended.model_validate(read_json(out)), seconds

    def _process(self, arguments: list[str], log: Path, sources: Mapping[str, str]) -> str:
        """Run to the end or to the time limit; how it ended, where it left nothing."""
        environment = {key: value for key, value in os.environ.items() if key not in _VARIABLES}
        environment |= {**sources, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with log.open("wb") as stream:
            started = warm_server(FOR_STAGES).run(
                ["-m", "equiport.bench.fidelity_run", *arguments],
                environment=environment,
                cwd=log.parent,
                stdout=stream.fileno(),
                stderr=stream.fileno(),
                new_session=True,
            )
            try:
                code = started.wait(self.bench.limit)
            except subprocess.TimeoutExpired:
                started.kill()
                return f"not done after {self.bench.limit:.0f} seconds"
        last = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {last[-1][:300] if last else 'nothing said'}"


def _forget(model: Path) -> None:
    for file in model.glob("*") if model.is_dir() else ():
        file.unlink()


def _logits(file: Path, vocabulary: int | None = None) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: logits[..., :vocabulary] for name, logits in load_file(file).items()}


def apart(value: Tensor, wanted: Tensor) -> Apart:
    """‖value − wanted‖ / ‖wanted‖ of logits [rows, 1 + steps, V]: of the first position, and of the others; in float64.

    Infinite where shapes differ or anything is not finite, unless both are equal in every bit of what is finite and
    alike elsewhere.
    """
    return Apart(prefill=_relative(value, wanted, slice(0, 1)), decode=_relative(value, wanted, slice(1, None)))


def _relative(value: Tensor, wanted: Tensor, steps: slice) -> float:
    if value.shape != wanted.shape:
        return float("inf")
    a, b = value[:, steps].double(), wanted[:, steps].double()
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        return float("inf")
    off, size = float((a - b).norm()), float(b.norm())
    return off / size if size else (0.0 if off == 0 else float("inf"))
