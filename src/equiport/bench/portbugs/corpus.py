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

from equiport.bench.family_models import FAMILIES
from equiport.bench.portbugs import operators
from equiport.bench.portbugs.judging import Judged, judge_port
from equiport.bench.portbugs.operator import BugOperator
from equiport.bench.portbugs.source_stack import SourceStack
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.port_classes import PortClasses
from equiport.stages.frame import Subject


class CaseResult(BaseModel):
    """One case: the operator, what equiport said, and whether that is right."""

    model_config = ConfigDict(frozen=True)

    operator: str
    family: str
    control: bool
    judged: Judged
    component_right: bool
    cause_right: bool

    @property
    def right(self) -> bool:
        """A bug detected, a control left alone."""
        return self.judged.detected != self.control


@cache
def corpus() -> tuple[BugOperator, ...]:
    """One instance of each operator."""
    for info in pkgutil.iter_modules(operators.__path__):
        importlib.import_module(f"{operators.__name__}.{info.name}")
    return tuple(cls() for cls in BugOperator.__subclasses__())


def run_case(operator: BugOperator, seed: int, work: Path | None = None) -> CaseResult:
    """Make a model of the operator's family with HF's own initialisation, put the bug in, judge it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="equiport-case-", dir=work) as folder:
        root = Path(folder)
        (root / "source").mkdir()
        (root / "source" / "config.json").write_text(json.dumps(FAMILIES[operator.family]), encoding="utf-8")
        model = materialize(root / "source", root / "model", WeightKind.DEFAULT, seed, tiny=False).folder
        file = root / "target.py"
        file.write_text(f'"""The source model with a defect: {operator.name}."""\n', encoding="utf-8")
        subject = Subject(model, PortClasses(file, "Source", "Source", "Config"), "nxdi")
        seeds = tuple(range(seed, seed + 3))
        judged = judge_port(subject, SourceStack(operator.inject), root / "exp", seeds)
    return CaseResult(
        operator=operator.name,
        family=operator.family,
        control=operator.control,
        judged=judged,
        component_right=any(part in judged.component for part in operator.component),
        cause_right=judged.cause in operator.causes,
    )


def families_of(chosen: Sequence[BugOperator]) -> tuple[str, ...]:
    """The families that the operators cover."""
    return tuple(dict.fromkeys(operator.family.split()[0] for operator in chosen))
