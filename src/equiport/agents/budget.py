"""Money: what may be spent in all, what is spent, and what jobs that run have set aside."""

from __future__ import annotations

from equiport.errors import EquiportError, ExitCode

#: Below this a job is not worth beginning: its first turn overshoots it.
LEAST_USD = 0.001


class BudgetSpent(EquiportError):
    """Nothing is left to spend; what is done is kept."""

    exit_code = ExitCode.PREREQUISITE


class Budget:
    """The budget of a whole port in USD; None: unlimited. Jobs may overshoot what they are given by a turn."""

    def __init__(self, total_usd: float | None, spent_usd: float = 0.0) -> None:
        self.total_usd, self.spent_usd, self._reserved = total_usd, spent_usd, 0.0

    @property
    def left_usd(self) -> float:
        """What no job has spent or set aside."""
        if self.total_usd is None:
            return float("inf")
        return self.total_usd - self.spent_usd - self._reserved

    def reserve(self, wanted_usd: float, what: str) -> float:
        """Set aside what a job may spend: what it wants, or what is left.

        Raises:
            BudgetSpent: nothing is left.
        """
        if self.left_usd < LEAST_USD:
            held = f" and {self._reserved:.2f} set aside for jobs that run" if self._reserved else ""
            raise BudgetSpent(
                f"the budget of {self.total_usd:.2f} USD does not suffice for {what}: {self.spent_usd:.4f} spent{held}",
                field="--budget-usd",
                remedy="Run again with a larger budget: nothing that is paid for is repeated.",
            )
        given = min(wanted_usd, self.left_usd)
        self._reserved += given
        return given

    def settle(self, reserved_usd: float, cost_usd: float) -> None:
        """A job has ended: its cost takes the place of what was set aside."""
        self._reserved -= reserved_usd
        self.spent_usd += cost_usd
