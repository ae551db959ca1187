"""equiv_config.json: the inputs of an experiment, collected once and validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json

CONFIG_NAME = "equiv_config.json"


class EquivConfig(BaseModel):
    """The inputs of seed 003 (upper-case keys in the file) and the settings that equiport adds to them."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", frozen=True)

    source_model_path: Path = Field(alias="SOURCE_MODEL_PATH")
    compiled_model_path: Path | None = Field(default=None, alias="COMPILED_MODEL_PATH")
    target_modeling_file: Path = Field(alias="TARGET_MODELING_FILE")
    target_inner_class: str = Field(alias="TARGET_INNER_CLASS", min_length=1)
    target_causal_class: str | None = Field(default=None, alias="TARGET_CAUSAL_CLASS")
    target_config_class: str = Field(alias="TARGET_CONFIG_CLASS", min_length=1)
    venv: Path | None = Field(default=None, alias="VENV")
    exp_dir: Path = Field(alias="EXP_DIR")
    target_stack: str = "nxdi"
    tp_degree: int = Field(default=1, ge=1)
    thresholds: Path | None = None
    seed: int = 42
    through: int = Field(default=6, ge=0, le=7)
    synthetic_weights: bool = False

    @field_validator("source_model_path", "target_modeling_file")
    @classmethod
    def _must_exist(cls, path: Path) -> Path:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        return path

    def save(self, folder: Path) -> Path:
        """Write equiv_config.json into `folder`, atomically."""
        return write_json(folder / CONFIG_NAME, self.model_dump(mode="json", by_alias=True))


def load_config(folder: Path) -> EquivConfig:
    """Read and validate `folder`/equiv_config.json.

    Raises:
        EquiportError: missing, no JSON, or a bad field (which is named).
    """
    path = folder / CONFIG_NAME
    raw = read_json(
        path,
        remedy="Run `equiport validate --port PORT.py --model HF_DIR --out EXP_DIR` or run_stage0.py to make it.",
    )
    if not isinstance(raw, dict):
        raise EquiportError("must be a JSON object", where=path, remedy="Make it again with `equiport validate`.")
    return config_from(raw, where=path)


def config_from(raw: dict[str, Any], where: Path | str) -> EquivConfig:
    """Validate raw values; `where` names their origin in errors."""
    try:
        return EquivConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise EquiportError(message, where=where, field=field, remedy="Correct this field.") from None
