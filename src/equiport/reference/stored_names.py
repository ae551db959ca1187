"""The names that stored tensors have in the loaded model: transformers renames some of them on load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from equiport.errors import EquiportError
from equiport.fixtures.folder import tensor_headers
from equiport.reference.key_layout import layout_of

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def loaded_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Stored name -> name in `model` (the source, possibly on the meta device), by transformers' own renaming.

    A name that the model has is taken as it is; one that no renaming brings into the model stays what it is. Several
    stored tensors that are merged on load (experts) get one name.

    Source: `transformers.conversion_mapping` (5.x); `_checkpoint_conversion_mapping` and
    `_fix_state_dict_key_on_load` (4.x).
    """
    own = set(model.state_dict())
    rename: Callable[[str], str] | None = None
    found, stored = {}, list(stored)
    added = layout_of(stored, model).added
    for name in stored:
        found[name] = name
        if name in own:
            continue
        if rename is None:
            rename = _renaming(model, own)
        loaded = rename(name.removeprefix(added))
        if loaded in own:
            found[name] = loaded
    return found


def check_stored(model: nn.Module, folder: Path) -> None:
    """Stored weights against the model's structure, by name and shape, from the files' headers alone.

    A tensor that other layers have, or one of another shape, is damage. Names that are absent throughout may mean
    another architecture: that is for the caller to ask. Experts, which are merged on load, and quantised weights are
    left out.

    Raises:
        EquiportError: the first such tensor, and how many there are.
    """
    headers = tensor_headers(folder)
    names = loaded_names(model, [header.name for header in headers])
    there = set(names.values())
    kinds = {_LAYER.sub("{i}", name) for name in there}
    own = model.state_dict()
    lacking = [name for name in own if name not in there and _LAYER.sub("{i}", name) in kinds]
    if lacking:
        raise EquiportError(
            f"weights lack {lacking[0]}, which other layers have"
            + (f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""),
            where=folder,
            remedy="Download the weights again.",
        )
    for header in headers:
        wanted = tuple(own[header.name].shape) if header.name in own else header.shape
        if wanted != header.shape:
            raise EquiportError(
                f"{header.name} has shape {list(header.shape)}, config.json asks for {list(wanted)}",
                where=header.file,
                remedy="Give the config.json that belongs to these weights.",
            )


def _renaming(model: nn.Module, own: set[str]) -> Callable[[str], str]:
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return lambda name: _with_prefix(_by_patterns(model, name), prefix, own)
    transforms: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings: list[Any] = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters: list[Any] = [item for item in transforms if isinstance(item, WeightConverter)]

    def rename(name: str) -> str:
        for item in renamings:
            name = item.rename_source_key(name)[0]
        for item in converters:
            # at most one conversion acts on a tensor
            renamed, matched = item.rename_source_key(name)
            if matched is not None:
                name = renamed
                break
        return _with_prefix(name, prefix, own)

    return rename


def _by_patterns(model: nn.Module, name: str) -> str:
    fix = getattr(type(model), "_fix_state_dict_key_on_load", None)
    name = fix(name)[0] if fix is not None else name
    for pattern, replacement in (getattr(type(model), "_checkpoint_conversion_mapping", None) or {}).items():
        renamed, count = re.subn(pattern, replacement, name)
        if count:
            return renamed
    return name


def _with_prefix(name: str, prefix: str, own: set[str]) -> str:
    """A base model's checkpoint lacks the backbone's prefix, or carries one that the model does not have."""
    if name in own or not prefix:
        return name
    for other in (f"{prefix}.{name}", name.removeprefix(prefix + ".")):
        if other in own:
            return other
    return name
