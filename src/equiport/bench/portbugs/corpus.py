"""The corpus: every operator, and how a case of it is made and judged."""

from __future__ import annotations

import importlib
import json
import pkgutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from equiport.bench.family_check import compose
from equiport.bench.portbugs import operators
from equiport.bench.portbugs.common_gates import CommonGates, common_gates
from equiport.bench.portbugs.configs import CONFIGS
from equiport.bench.portbugs.judging import Judged, judge_port
from equiport.bench.portbugs.operator import BugOperator, Defect, PortBug
from equiport.bench.portbugs.source_stack import SourceStack
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import PortClasses, find_port_classes
from equiport.stages.frame import Subject


class CaseResult(BaseModel):
    """One case: the operator, what equiport said, and whether that is right."""

    model_config = ConfigDict(frozen=True)

    operator: str
    family: str
    control: bool
    quick: bool
    seed: int
    judged: Judged
    component_right: bool
    cause_right: bool
    common: CommonGates | None = None

    @property
    def right(self) -> bool:
        """A bug detected, a control left alone."""
        return self.judged.detected != self.control


@cache
def corpus() -> tuple[Defect, ...]:
    """One instance of each operator, those on source models first."""
    for info in pkgutil.iter_modules(operators.__path__):
        importlib.import_module(f"{operators.__name__}.{info.name}")
    return tuple(cls() for base in (BugOperator, PortBug) for cls in base.__subclasses__())


def run_case(operator: Defect, seed: int, work: Path | None = None, *, with_common: bool = False) -> CaseResult:
    """Make a model of the operator's family with HF's own initialisation, put the bug in, judge it.

    Raises:
        EquiportError: the family cannot be made or ported, or the operator does not fit the port.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="equiport-case-", dir=work) as folder:
        root = Path(folder)
        (root / "source").mkdir()
        (root / "source" / "config.json").write_text(json.dumps(CONFIGS[operator.family]), encoding="utf-8")
        model = materialize(root / "source", root / "model", WeightKind.DEFAULT, seed, tiny=False).folder
        subject, adapter = _port(operator, model, root)
        seeds = tuple(range(seed, seed + 3))
        judged = judge_port(subject, adapter, root / "exp", seeds, split=operator.split)
        perturbed = root / "exp" / "fixtures" / f"perturbed-{seed}"
        common = common_gates(subject, adapter, perturbed, seed) if with_common else None
    return CaseResult(
        operator=operator.name,
        family=operator.family,
        control=operator.control,
        quick=operator.quick,
        seed=seed,
        judged=judged,
        component_right=any(part in judged.component for part in operator.component),
        cause_right=judged.cause in operator.causes or (not operator.causes and judged.stage == 0),
        common=common,
    )


def _port(operator: Defect, model: Path, root: Path) -> tuple[Subject, StackAdapter]:
    """The port of the model with the bug in it, and the stack that runs it."""
    if isinstance(operator, PortBug):
        made = compose(model, root / "src")
        made.write_text(operator.edit(made.read_text(encoding="utf-8")), encoding="utf-8")
        return Subject(model, find_port_classes(made), "nxdi"), load_adapter("nxdi")
    assert isinstance(operator, BugOperator)
    file = root / "target.py"
    file.write_text(f'"""The source model with a defect: {operator.name}."""\n', encoding="utf-8")
    return Subject(model, PortClasses(file, "Source", "Source", "Config"), "nxdi"), SourceStack(operator.inject)


def families_of(chosen: Sequence[Defect]) -> tuple[str, ...]:
    """The families that the operators cover."""
    return tuple(dict.fromkeys(operator.family.split()[0] for operator in chosen))
