"""One row a port: how far stand-in and real stack are apart; the table as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

#: Relative L2 distance of logits up to which both tiers compute the same.
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}


class Apart(BaseModel):
    """‖a − b‖ / ‖b‖ over all rows: of the logits after the prompts, and of the decode steps'; inf where not finite."""

    model_config = ConfigDict(frozen=True)

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.prefill, self.decode)


class TierEnd(BaseModel):
    """What became of a port on one tier; see `fidelity_run.Ended`."""

    model_config = ConfigDict(frozen=True)

    status: str
    phase: str = ""
    said: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()


class FidelityRow(BaseModel):
    """One port. `tiers`: by name. `apart`: stand-in against real, by dtype; `source`: real against HF in fp32.

    `obstacle` says why neither tier was tried.
    """

    model_config = ConfigDict(frozen=True)

    port: str
    kind: str = ""
    model_type: str = ""
    obstacle: str = ""
    tiers: dict[str, TierEnd] = {}
    apart: dict[str, Apart] = {}
    source: Apart | None = None

    def ran(self, tier: str) -> bool:
        """Whether it gave logits on that tier."""
        return tier in self.tiers and self.tiers[tier].status == "ran"

    @property
    def compared(self) -> bool:
        """Whether both tiers gave logits."""
        return bool(self.apart)

    @property
    def passed(self) -> bool:
        """Compared, and no further apart than the limits."""
        return self.compared and all(found.worst <= LIMITS[dtype] for dtype, found in self.apart.items())

    @property
    def route(self) -> str:
        """How it was loaded: its counterpart, and what the adapter had to supply."""
        notes = dict.fromkeys(note for end in self.tiers.values() for note in end.notes)
        return "; ".join([self.model_type, *notes])


class FidelityTable(BaseModel):
    """All rows. `tree`, `sources`: commit or digest. `versions` of torch and transformers."""

    tree: str
    sources: dict[str, str]
    stand_in: str
    versions: dict[str, str]
    dtypes: tuple[str, ...]
    prompts: tuple[int, ...]
    decode_steps: int
    limits: dict[str, float] = LIMITS
    rows: tuple[FidelityRow, ...] = ()

    @property
    def passed(self) -> bool:
        """Something was compared, and all of it is within the limits."""
        compared = [row for row in self.rows if row.compared]
        return bool(compared) and all(row.passed for row in compared)

    def summary(self) -> dict[str, Any]:
        """Counts, and the worst distance by dtype."""
        compared = [row for row in self.rows if row.compared]
        worst = {
            dtype: max((row.apart[dtype].worst for row in compared if dtype in row.apart), default=None)
            for dtype in self.dtypes
        }
        return {
            "ports": len(self.rows),
            "ran_real": sum(row.ran("real-cpu") for row in self.rows),
            "ran_stand_in": sum(row.ran("stand-in") for row in self.rows),
            "compared": len(compared),
            "within_limits": sum(row.passed for row in compared),
            "bit_equal_fp32": sum("float32" in row.apart and row.apart["float32"].worst == 0 for row in compared),
            "worst": worst,
        }


_FORM = "{:<38} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {}"


def lines_of(rows: Iterable[FidelityRow], *, head: bool = True) -> list[str]:
    """The table as text, one line a port: prefill and decode in fp32 and bf16, real against HF, route or reason."""
    lines = []
    if head:
        over = ("", "fp32", "", "bf16", "", "real-HF", "", "")
        under = ("port", "prefill", "decode", "prefill", "decode", "prefill", "decode", "route, or why it did not run")
        lines = [_FORM.format(*over).rstrip(), _FORM.format(*under)]
    for row in rows:
        figures = [*_pair(row.apart.get("float32")), *_pair(row.apart.get("bfloat16")), *_pair(row.source)]
        lines.append(_FORM.format(row.port[:38], *figures, _told(row)).rstrip())
    return lines


def _pair(found: Apart | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (_figure(found.prefill), _figure(found.decode))


def _figure(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _told(row: FidelityRow) -> str:
    if row.obstacle:
        return f"not run: {row.obstacle}"[:200]
    stopped = [(tier, end) for tier, end in row.tiers.items() if end.status != "ran"]
    if len({(end.status, end.phase, end.said) for _, end in stopped}) == 1 < len(stopped):
        stopped = [("both tiers", stopped[0][1])]
    told = [f"{tier} {end.status}, {end.phase}: {end.said}"[:240] for tier, end in stopped]
    lost = max((end.unloaded for end in row.tiers.values()), key=len, default=())
    if lost:
        told.append(f"{len(lost)} weights not whole ({lost[0]})")
    return " | ".join(told) or row.route[:200]


def summary_lines(table: FidelityTable) -> list[str]:
    """The counts as text."""
    found = table.summary()
    worst = ", ".join(
        f"{dtype} {_figure(value)} (limit {table.limits[dtype]:.0e})"
        for dtype, value in found["worst"].items()
        if value is not None
    )
    within = f"{found['within_limits']} of {found['compared']} within the limits"
    return [
        f"{found['ports']} ports: {found['ran_real']} run on the real packages, {found['ran_stand_in']} on the "
        f"stand-in, {found['compared']} on both",
        f"{within}, {found['bit_equal_fp32']} bit-equal in fp32" + (f"; worst {worst}" if worst else ""),
        f"tree {table.tree}; " + "; ".join(f"{name} {version}" for name, version in table.sources.items()),
    ]
