"""Write a file whole or not at all: a temporary name beside it, then a rename."""

from __future__ import annotations

import json
import os
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from equiport.errors import EquiportError


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path` atomically, making its folder.

    Raises:
        EquiportError: the disk is full or the place is not writable.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise EquiportError(
            f"cannot be written: {error.strerror or error}",
            where=path,
            remedy="Free some disk space or choose a writable folder; nothing half-written was left.",
        ) from error
    finally:
        # also when interrupted
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write `value`, pydantic models in it included, as indented JSON, atomically; see `plain`."""
    return write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, remedy: str = "Restore the file or make it again.") -> Any:
    """Parse a JSON file.

    Raises:
        EquiportError: missing, unreadable, or no JSON (with line and column).
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EquiportError("no such file", where=path, remedy=remedy) from None
    except json.JSONDecodeError as error:
        raise EquiportError(
            f"is no JSON: {error.msg} at line {error.lineno}, column {error.colno}", where=path, remedy=remedy
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EquiportError(f"cannot be read: {error}", where=path, remedy=remedy) from None


def plain(value: Any) -> Any:
    """`value` in JSON's own types. NaN and Inf become the strings "nan", "inf", "-inf", which pydantic reads as floats:
    its own JSON mode makes them null."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value
