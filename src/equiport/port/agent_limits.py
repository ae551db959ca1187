"""What agents may cost: attempts, money, turns, time, and how many run side by side."""

from __future__ import annotations

from dataclasses import dataclass

from equiport.errors import EquiportError

#: More than this many agent processes at once take longer than they save.
MOST_PARALLEL = 4


@dataclass(frozen=True)
class AgentLimits:
    """`unit_usd`: for all attempts at one unit; `total_usd`: for the whole port, None without a limit; `timeout` of one
    job in seconds."""

    attempts: int = 3
    unit_usd: float = 3.0
    total_usd: float | None = None
    turns: int = 60
    timeout: float = 1800.0
    parallel: int = MOST_PARALLEL
    model: str | None = None

    def __post_init__(self) -> None:
        """Raises EquiportError for limits under which nothing could be done."""
        for value, flag in (
            (self.attempts, "--attempts"),
            (self.unit_usd, "--unit-budget-usd"),
            (self.turns, "--max-turns"),
            (1.0 if self.total_usd is None else self.total_usd, "--budget-usd"),
        ):
            if not value > 0:
                raise EquiportError(f"{value:g} is not above zero", field=flag, remedy="Give a larger number.")
