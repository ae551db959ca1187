"""Translators: who makes a unit. One protocol, whether recipes or an agent stand behind it.

A unit's result is a block file and a unit test, named as the translate-model workflow names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from equiport.port.made_unit import MadeUnit
from equiport.port.plan_schema import PortPlan, PortUnit

BLOCK_FILE = "nxdi_block.py"
TEST_FILE = "test_block.py"


@dataclass(frozen=True)
class UnitRequest:
    """One unit to translate. `model`: the HF folder; `folder`: the unit's own; `config`: a tiny source config; `made`:
    units that no recipe made and that this one may contain."""

    plan: PortPlan
    unit: PortUnit
    model: Path
    folder: Path
    config: dict[str, Any]
    made: tuple[MadeUnit, ...] = ()


@dataclass(frozen=True)
class UnitFiles:
    """What a translator made: source texts of the block and of its test."""

    block: str
    test: str


class Translator(Protocol):
    """Makes the files of a unit. It does not judge them: the toolkit runs the test."""

    name: str

    def can(self, plan: PortPlan, unit: PortUnit) -> tuple[str, ...]:
        """Why this translator cannot make the unit; empty when it can."""
        ...

    def translate(self, request: UnitRequest) -> UnitFiles:
        """The unit's files.

        Raises:
            EquiportError: the unit cannot be made.
        """
        ...
