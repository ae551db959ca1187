"""The folder that a plan or a port is written into, checked before anything costs time."""

from __future__ import annotations

import os
from pathlib import Path

from equiport.errors import EquiportError


def check_out(out: Path) -> None:
    """Whether a folder can be made at `out`, without making it.

    Raises:
        EquiportError: a file stands there or above it, or the place is not writable.
    """
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    why = "is no folder" if not place.is_dir() else "is not writable" if not os.access(place, os.W_OK | os.X_OK) else ""
    if why:
        raise EquiportError(why, where=place, field="--out", remedy="Choose another folder.")
