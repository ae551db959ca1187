"""What the audit finds and flags, as figures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RuleRow(BaseModel):
    """One rule. `own`: found of its own samples; `held_out`: of cheats that it was not written with; `flagged`:
    honest files that it flags, of all."""

    model_config = ConfigDict(frozen=True)

    rule: str
    own: int
    own_total: int
    held_out: int
    held_out_total: int
    flagged: int


class AuditTable(BaseModel):
    """The whole run. `missed`: cheats without a finding of their rule; `alarms`: honest files with one, and which."""

    model_config = ConfigDict(frozen=True)

    rows: list[RuleRow]
    honest_files: int
    honest_kinds: dict[str, int]
    missed: list[str] = Field(default_factory=list)
    alarms: list[str] = Field(default_factory=list)
    seconds: float = 0.0

    @property
    def cheats(self) -> int:
        """Cheating samples."""
        return sum(row.own_total + row.held_out_total for row in self.rows)

    @property
    def found(self) -> int:
        """Cheating samples that were found."""
        return sum(row.own + row.held_out for row in self.rows)

    @property
    def passed(self) -> bool:
        """Everything found, nothing flagged."""
        return self.cheats > 0 and self.found == self.cheats and not self.alarms and self.honest_files > 0


def lines_of(table: AuditTable) -> list[str]:
    """The table for a terminal."""
    lines = [f"{'rule':<26}{'own samples':>12}{'held out':>10}{'detection':>11}{'false positives':>17}"]
    for row in table.rows:
        total, found = row.own_total + row.held_out_total, row.own + row.held_out
        rate = f"{found / total:.0%}" if total else "-"
        false = f"{row.flagged} of {table.honest_files}"
        own, held = f"{row.own}/{row.own_total}", f"{row.held_out}/{row.held_out_total}"
        lines.append(f"{row.rule:<26}{own:>12}{held:>10}{rate:>11}{false:>17}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in table.honest_kinds.items())
    flagged = len({alarm.partition(" ")[0] for alarm in table.alarms})
    lines += [
        "",
        f"{table.found} of {table.cheats} cheats found ({table.found / max(1, table.cheats):.1%}); "
        f"{flagged} of {table.honest_files} honest files flagged ({kinds}); {table.seconds:.1f} s",
        *(f"  missed: {item}" for item in table.missed),
        *(f"  false positive: {item}" for item in table.alarms),
    ]
    return lines
