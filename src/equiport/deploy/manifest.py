"""The manifest of an installation: which files are ours, by their hashes."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from equiport import __version__
from equiport.deploy.layout import OWN
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json

MANIFEST = f"{OWN}/manifest.json"


class Manifest(BaseModel):
    """Paths are relative to DEST. `files`: path -> sha256 as installed; `before`: hashes that an interrupted update may
    have left; `backups`: path -> where the user's own file was moved; `folders`: those that were made, outermost first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    tool_version: str = __version__
    kind: str
    root: str
    files: dict[str, str]
    before: dict[str, str] = Field(default_factory=dict)
    backups: dict[str, str] = Field(default_factory=dict)
    folders: list[str] = Field(default_factory=list)

    @field_validator("files", "before", "backups")
    @classmethod
    def _inside(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value:
            _check_inside(path)
        return value

    @field_validator("backups")
    @classmethod
    def _backups_inside(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value.values():
            _check_inside(path)
        return value

    @field_validator("folders")
    @classmethod
    def _folders_inside(cls, value: list[str]) -> list[str]:
        for path in value:
            _check_inside(path)
        return value

    def owns(self, path: str, digest: str) -> bool:
        """Whether a file with this hash is as we left it."""
        return digest in (self.files.get(path), self.before.get(path))


def _check_inside(path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path} lies outside")


def read_manifest(destination: Path) -> Manifest | None:
    """The manifest below DEST; None when there is none.

    Raises:
        EquiportError: it is damaged, or names files outside DEST.
    """
    path = destination / MANIFEST
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate(read_json(path, remedy="Remove the files by hand."))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy="Remove the files by hand.") from None


def write_manifest(destination: Path, manifest: Manifest) -> None:
    """Write it whole."""
    write_json(destination / MANIFEST, manifest)
