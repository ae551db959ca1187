"""Every family that recipes serve, ported and validated through the commands themselves, tier by tier.

The port is made once, on the stand-in; the same file is validated on the real packages where their sources are given,
and the logits of both are compared. Quick: what the stages compute, without unit tests, scripts, pytest and reports.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from equiport.bench.commands import run_equiport, run_python
from equiport.bench.family_models import folder_of, write_model
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import write_text

_STACK = "nxdi"


class TierRow(BaseModel):
    """One family on one tier. `r32`: the largest of any component; `r`: components' largest geometric mean;
    `r_logits`: pooled, centred, of teacher-forced decoding. `tier` is what the results say ran."""

    model_config = ConfigDict(frozen=True)

    tier: str
    verdict: str
    seconds: float
    r32: float | None = None
    r: float | None = None
    r_logits: float | None = None
    said: str = ""


class FamilyRow(BaseModel):
    """One family. `logits_apart`: relative L2 distance of the fp32 logits of the two tiers."""

    model_config = ConfigDict(frozen=True)

    family: str
    tiers: tuple[TierRow, ...]
    logits_apart: float | None = None

    @property
    def passed(self) -> bool:
        """PASS on every tier, and the tiers compute the same."""
        apart = self.logits_apart is None or self.logits_apart < 1e-5
        return bool(self.tiers) and all(row.verdict == Verdict.PASS.value for row in self.tiers) and apart


class FamiliesTable(BaseModel):
    """All rows, and what they were made with."""

    quick: bool
    versions: dict[str, str]
    rows: tuple[FamilyRow, ...] = ()

    @property
    def passed(self) -> bool:
        """Every family passes."""
        return bool(self.rows) and all(row.passed for row in self.rows)


@dataclass(frozen=True)
class FamiliesBench:
    """What to run. `sources`: the real packages' source folders by environment variable; empty: the stand-in alone.

    `quick`: stage 0, components and logits alone. `work`: where everything goes and stays; None: a temporary folder.
    """

    names: tuple[str, ...]
    sources: Mapping[str, str]
    quick: bool = False
    work: Path | None = None


def run_families(bench: FamiliesBench, say: Callable[[FamilyRow], None] = lambda _: None) -> FamiliesTable:
    """Port and validate each family; `say` is told each row when it is there (`quick`: all at the end).

    Raises:
        EquiportError: a check ended without a result.
    """
    rows: list[FamilyRow] = []
    kept = nullcontext(str(bench.work)) if bench.work else tempfile.TemporaryDirectory(prefix="equiport-families-")
    with kept as root:
        work = Path(root).absolute()
        work.mkdir(parents=True, exist_ok=True)
        for row in _checked(bench, work) if bench.quick else (_family(name, work, bench) for name in bench.names):
            rows.append(row)
            say(row)
    return FamiliesTable(quick=bench.quick, versions=_versions(), rows=tuple(rows))


def _family(name: str, work: Path, bench: FamiliesBench) -> FamilyRow:
    """The commands themselves: port on the stand-in, validate the same file on the real packages."""
    folder = folder_of(name, work)
    model, out = folder / "model", folder / "port"
    if not model.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        write_model(name, model)
    rows = [_tier(["port", str(model), "--out", str(out)], out / "exp", {}, folder / "port.log")]
    found = sorted((out / "src").glob("modeling_*.py"))
    if not bench.sources or not found:
        return FamilyRow(family=name, tiers=tuple(rows))
    command = ["validate", "--port", str(found[0]), "--model", str(model), "--out", str(folder / "exp-real")]
    rows.append(_tier(command, folder / "exp-real", bench.sources, folder / "real.log"))
    # the port that was validated, not one composed anew
    write_text(folder / "src" / found[0].name, found[0].read_text(encoding="utf-8"))
    for sources in ({}, bench.sources):
        _check(work, [name], sources)
    return FamilyRow(family=name, tiers=tuple(rows), logits_apart=_apart(folder))


def _checked(bench: FamiliesBench, work: Path) -> Iterator[FamilyRow]:
    """Stage 0, components and logits in one process a tier."""
    tiers = [_check(work, bench.names, sources) for sources in ({}, bench.sources)[: 2 if bench.sources else 1]]
    for name in bench.names:
        found = tuple(rows[name] for rows in tiers)
        yield FamilyRow(family=name, tiers=found, logits_apart=_apart(folder_of(name, work)))


def _check(work: Path, names: Iterable[str], sources: Mapping[str, str]) -> dict[str, TierRow]:
    out = work / "check.jsonl"
    out.unlink(missing_ok=True)
    ended = run_python(["-m", "equiport.bench.family_check", str(out), str(work), _STACK, *names], sources)
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    rows = [json.loads(line) for line in lines]
    found = {row.pop("family"): TierRow(**row) for row in rows}
    lacking = [name for name in names if name not in found]
    if lacking:
        said = (ended.stderr.strip().splitlines() or ["nothing"])[-1]
        raise EquiportError(f"the check ended without a result for {lacking[0]}: {said}", field="--family")
    return found


def _tier(command: list[str], exp: Path, sources: Mapping[str, str], log: Path) -> TierRow:
    """Run one command and read what its experiment holds."""
    clock = time.monotonic()
    ended = run_equiport([*command, "--quiet"], sources)
    seconds = time.monotonic() - clock
    log.write_text(ended.stdout + ended.stderr, encoding="utf-8")
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    verdict = {0: Verdict.PASS.value, 1: Verdict.FAIL.value, 2: "BAD INPUT"}.get(
        ended.returncode, Verdict.INCONCLUSIVE.value
    )
    last = "" if ended.returncode == 0 or not said else said[-1]
    if not (exp / "equiv_config.json").is_file():
        return TierRow(tier="none", verdict=verdict, seconds=seconds, said=last)
    experiment = Experiment.open(exp)
    components, logits = experiment.result(2), experiment.result(5)
    stamp = components.backend if components else None
    rows = components.metrics.get("rows", []) if components else []
    paths = logits.metrics.get("paths", []) if logits else []
    return TierRow(
        tier=stamp.kind if stamp else "none",
        verdict=verdict,
        seconds=round(seconds, 1),
        r32=max((row["r32_worst"] for row in rows if row["r32_worst"] is not None), default=None),
        r=max((row["r_geomean"] for row in rows if row["r_geomean"] is not None), default=None),
        r_logits=next((path["r_centred"] for path in paths if path["path"] == "decode"), None),
        said=last,
    )


def _apart(folder: Path) -> float | None:
    """‖real − stand-in‖ / ‖stand-in‖ of the port's fp32 logits; None when either is not there."""
    from safetensors.torch import load_file

    files = [folder / f"logits-{tier}.safetensors" for tier in ("stand-in", "real-cpu")]
    if not all(file.is_file() for file in files):
        return None
    own, real = (load_file(file)["logits"].double() for file in files)
    return float((real - own).norm() / own.norm())


def _versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("torch", "transformers")}


def lines_of(rows: Iterable[FamilyRow], *, head: bool = True) -> list[str]:
    """The table as text, one line a family and tier."""
    form = "{:<30} {:<9} {:>7} {:>8} {:>6} {:>8} {:>9}  {}"
    lines = [form.format("family", "tier", "seconds", "R32", "R", "R logits", "apart", "verdict")] if head else []
    for row in rows:
        for number, tier in enumerate(row.tiers):
            apart = f"{row.logits_apart:.1e}" if number and row.logits_apart is not None else ""
            figures = (_figure(tier.r32, ".1e"), _figure(tier.r, ".3f"), _figure(tier.r_logits, ".3f"))
            said = f"{tier.verdict}  {tier.said}".rstrip()
            lines.append(form.format(row.family, tier.tier, f"{tier.seconds:.0f}", *figures, apart, said))
    return lines


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
