"""Evidence is bound to its inputs by their sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from equiport.errors import EquiportError

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


def sha256(path: Path) -> str:
    """The file's sha256, read in 4-MB pieces.

    Raises:
        EquiportError: the file is missing or unreadable.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    except OSError as error:
        raise EquiportError(f"cannot be read: {error.strerror}", where=path, remedy="Check the path.") from None
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The files of a HF folder that decide what it computes: config, weights, index, tokenizer."""
    return sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})


def port_files(modeling_file: Path) -> list[Path]:
    """The modeling file and the Python files beside it, which it may import."""
    return sorted({modeling_file, *modeling_file.parent.glob("*.py")})


def hash_inputs(paths: Iterable[Path], root: Path | None) -> dict[str, str]:
    """Path -> sha256; paths inside `root` are written relative to it, others absolute."""
    hashes = {}
    for path in paths:
        absolute = path.resolve()
        inside = root is not None and absolute.is_relative_to(root.resolve())
        hashes[str(absolute.relative_to(root.resolve())) if inside and root else str(absolute)] = sha256(absolute)
    return hashes
