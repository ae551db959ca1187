"""What is left of a unit's own budget: all attempts at it count, those of earlier processes too."""

from __future__ import annotations

from pathlib import Path

from equiport.agents.budget import LEAST_USD
from equiport.agents.sessions import Sessions
from equiport.errors import EquiportError, ExitCode
from equiport.port.agent_limits import AgentLimits


class UnitFailed(EquiportError):
    """No attempt at a unit was accepted, or its budget is spent."""

    exit_code = ExitCode.FAIL


def left_for(unit: str, folder: Path, sessions: Sessions, limits: AgentLimits) -> float:
    """USD that the next job for this unit may cost.

    Raises:
        UnitFailed: nothing is left.
    """
    tasks = (f"unit {unit}", f"places of unit {unit}", f"weight rules of unit {unit}")
    left = limits.unit_usd - sum(sessions.cost_of(task) for task in tasks)
    if left < LEAST_USD:
        raise UnitFailed(
            f"unit {unit}: its {limits.unit_usd:.2f} USD are spent and no attempt was accepted",
            where=folder,
            field="--unit-budget-usd",
            remedy="Give a larger one, or translate the unit by hand.",
        )
    return left
