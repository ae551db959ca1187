"""The weight files of a HuggingFace folder, checked before a stack loads them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from equiport.errors import EquiportError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def checkpoint_keys(folder: str | Path) -> tuple[str, ...]:
    """Names of the tensors in the folder's safetensors files, sorted; empty for a .bin checkpoint.

    Reads headers only; a header that promises more bytes than the file has is found.

    Raises:
        EquiportError: no folder, no weights, a shard that the index names is missing, or a file is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise EquiportError("no such folder", where=folder, remedy="Give a local HuggingFace model folder.")
    if (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    elif (folder / _INDEX).is_file():
        files = _shards(folder / _INDEX)
    elif any((folder / name).is_file() for name in _TORCH):
        return ()
    else:
        raise EquiportError(
            "holds no weights (model.safetensors, its index, or pytorch_model.bin)",
            where=folder,
            remedy="Download the weights, or use a folder that has them.",
        )
    keys: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                keys += opened.keys()
        except (SafetensorError, OSError) as fault:
            raise EquiportError(
                f"damaged or truncated: {fault}", where=file, remedy="Download this file again."
            ) from fault
    return tuple(sorted(keys))


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, OSError) as fault:
        raise EquiportError(
            f"is no checkpoint index: {fault}", where=index, field="weight_map", remedy="Download this file again."
        ) from fault
    for name in names:
        if not (index.parent / name).is_file():
            raise EquiportError(f"names {name}, which is missing", where=index, remedy=f"Download {name}.")
    return [index.parent / name for name in names]
