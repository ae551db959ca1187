"""port_plan.json: what phase 1 decides, typed and versioned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json
from equiport.port.fingerprint import BlockContract, Fingerprint, OpenQuestion

PLAN_NAME = "port_plan.json"
SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReferenceModel(_Model):
    """The stack's own model that the port is modelled after."""

    name: str
    module: str
    why: str


class Substitution(_Model):
    """One block of the source, the recipe it wants, and the stack's primitive that takes its place."""

    block: str  # an id of plan_blocks.BLOCKS
    path: str  # where it stands in the source
    cls: str
    primitive: str  # "" when the stack has nothing of the kind
    has_recipe: bool
    why: str  # the facet that asks for it


class ConfigAttribute(_Model):
    """One attribute that the stack's config class must have."""

    name: str
    value: Any
    kind: Literal["verbatim", "derived"]  # derived: made in add_derived_config
    source: str  # the key it stands in, or how it is made


class SourceClass(_Model):
    """A class to translate."""

    cls: str
    file: str
    line: int
    path: str


class PortUnit(_Model):
    """One independent piece of work."""

    id: str
    title: str
    kind: Literal["attention", "mlp", "moe", "embedding_norm", "position", "recurrent", "layer"]
    blocks: tuple[str, ...]
    sources: tuple[SourceClass, ...]
    primitives: tuple[str, ...]
    instructions: tuple[str, ...]
    watch: tuple[str, ...]
    contracts: tuple[BlockContract, ...]
    missing_recipes: tuple[str, ...]


class Unsupported(_Model):
    """A block that is named and not translated."""

    what: str
    why: str


class PortPlan(_Model):
    """The whole plan. `open_questions` must be empty before a port begins."""

    schema_version: Literal[1] = 1
    tool_version: str
    stack: str
    fingerprint: Fingerprint
    routing: str
    reference: ReferenceModel
    substitutions: tuple[Substitution, ...]
    unsupported: tuple[Unsupported, ...]
    missing_recipes: tuple[str, ...]
    config_attributes: tuple[ConfigAttribute, ...]
    units: tuple[PortUnit, ...]
    open_questions: tuple[OpenQuestion, ...]
    stopped_by: tuple[str, ...] = ()  # questions that were answered with "stop"
    answers: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """Whether a port may begin: nothing is open, nothing was answered with "stop"."""
        return not self.open_questions and not self.stopped_by


def write_plan(folder: Path, plan: PortPlan) -> Path:
    """Write port_plan.json."""
    return write_json(folder / PLAN_NAME, plan)


def read_plan(path: Path) -> PortPlan:
    """A stored plan.

    Raises:
        EquiportError: missing, no JSON, or not a plan of this version.
    """
    value = read_json(path, remedy="Run `equiport plan` again.")
    try:
        return PortPlan.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy="Run `equiport plan` again.") from None
