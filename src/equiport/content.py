"""Where the content folders are (adapters, templates, scripts, ...), in a checkout and in a wheel alike."""

from __future__ import annotations

from pathlib import Path

from equiport.errors import EquiportError

_PACKAGE = Path(__file__).resolve().parent


def content_dir(name: str) -> Path:
    """The folder `name` of the repository root (checkout) or of the installed wheel.

    Raises:
        EquiportError: the folder is in neither place.
    """
    for root in (_PACKAGE / "_content", _PACKAGE.parents[1]):
        if (root / name).is_dir():
            return root / name
    raise EquiportError(f"content folder {name!r} is missing", where=_PACKAGE, remedy="Reinstall equiport.")
