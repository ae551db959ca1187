"""How a model's hidden states become one vector: read from the sentence-transformers files, or said by the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equiport.errors import EquiportError
from equiport.fixtures.folder import read_config


class PoolingMode(str, Enum):
    """Which hidden states count: that of the last token, the mean of all, or that of the first."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


@dataclass(frozen=True)
class Pooling:
    """What is done with hidden states. `backbone`: the HF folder; `origin`: who says so; `files`: what was read."""

    mode: PoolingMode
    normalize: bool
    backbone: Path
    origin: str
    files: tuple[Path, ...] = ()
    lower_case: bool = False
    longest: int | None = None


_MODULES = "modules.json"
_FLAGS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}
_WORDS = {"cls": PoolingMode.CLS, "mean": PoolingMode.MEAN, "lasttoken": PoolingMode.LAST}


def read_pooling(folder: Path, mode: PoolingMode | None = None, normalize: bool | None = None) -> Pooling:
    """The pooling of `folder`: modules.json and what it names, else 1_Pooling/config.json, else the arguments.

    Nothing is guessed: what neither the files nor the arguments say is asked for, and where both speak they must agree.

    Raises:
        EquiportError: unknown or contradicting files, a pooling that is not offered, or something that nobody says.
    """
    if not folder.is_dir():
        raise EquiportError("no such model folder", where=folder, remedy="Give a HuggingFace folder.")
    found = _from_modules(folder) if (folder / _MODULES).is_file() else _from_pooling_folder(folder)
    said_mode, said_normalize, backbone, files = found
    return Pooling(
        _agreed("--pooling", said_mode, mode, folder, "Say --pooling last, mean or cls."),
        _agreed("--normalize", said_normalize, normalize, folder, "Say --normalize or --no-normalize."),
        backbone,
        "the folder's files" if said_mode is not None else "the flags",
        *_limits(folder, backbone, files),
    )


def pool(hidden: Tensor, mask: Tensor, mode: PoolingMode) -> Tensor:
    """float32 [B, H] of hidden states [B, T, H] and a mask [B, T] (1: a token), padded on either side."""
    hidden = hidden.float()
    if mode is PoolingMode.MEAN:
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        # what sits at padding may be NaN, and 0 x NaN is not 0
        return hidden.masked_fill(weights == 0, 0.0).sum(dim=1) / weights.sum(dim=1)
    places = torch.arange(mask.shape[1]).expand_as(mask)
    if mode is PoolingMode.LAST:
        rows = places.masked_fill(mask == 0, -1).amax(dim=1)
    else:
        rows = places.masked_fill(mask == 0, mask.shape[1]).amin(dim=1)
    return hidden[torch.arange(len(hidden)), rows]


def _agreed(flag: str, of_files: Any, of_flag: Any, folder: Path, remedy: str) -> Any:
    if of_files is None and of_flag is None:
        raise EquiportError("is said by no file of the folder", where=folder, field=flag, remedy=remedy)
    if of_files is not None and of_flag is not None and of_files != of_flag:
        says = getattr(of_files, "value", of_files)
        asked = getattr(of_flag, "value", of_flag)
        raise EquiportError(
            f"the folder's files say {says}, the flag says {asked}",
            where=folder,
            field=flag,
            remedy="Leave the flag out, or correct the files.",
        )
    return of_files if of_flag is None else of_flag


def _from_modules(folder: Path) -> tuple[PoolingMode, bool, Path, tuple[Path, ...]]:
    file = folder / _MODULES
    modules = _json(file)
    if not isinstance(modules, list) or not all(isinstance(item, dict) for item in modules):
        raise EquiportError("is no list of modules", where=file, remedy="Restore the file.")
    kinds = [str(item.get("type", "")).rpartition(".")[2] for item in modules]
    wanted = ["Transformer", "Pooling"]
    if kinds not in (wanted, [*wanted, "Normalize"]):
        raise EquiportError(
            f"modules {', '.join(kinds) or '(none)'} are not offered",
            where=file,
            remedy="Offered are Transformer, Pooling and, if it is there, Normalize: one of each, in this order.",
        )
    backbone, config = (_inside(folder, str(item.get("path", "")), file) for item in modules[:2])
    config = config / "config.json"
    return _mode(config, backbone), "Normalize" in kinds, backbone, (file, config)


def _from_pooling_folder(folder: Path) -> tuple[PoolingMode | None, bool | None, Path, tuple[Path, ...]]:
    configs = sorted(folder.glob("*_Pooling/config.json"))
    if len(configs) > 1:
        raise EquiportError("several poolings and no modules.json", where=folder, remedy="Restore modules.json.")
    normalized = True if any(folder.glob("*_Normalize")) else None
    if not configs:
        return None, normalized, folder, ()
    return _mode(configs[0], folder), normalized, folder, (configs[0],)


def _mode(file: Path, backbone: Path) -> PoolingMode:
    config = _json(file)
    if not isinstance(config, dict):
        raise EquiportError("is no JSON object", where=file, remedy="Restore the file.")
    word = config.get("pooling_mode")
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    named = [_WORDS.get(part) for part in (word if isinstance(word, list) else [word])] if word is not None else []
    modes = [*named, *(_FLAGS.get(key) for key in flags)]
    if len(set(modes)) != 1 or modes[0] is None:
        said = ", ".join([*([str(word)] if word is not None else []), *flags]) or "none"
        raise EquiportError(
            f"pooling modes: {said}",
            where=file,
            field="pooling_mode",
            remedy="Offered is one of cls_token, mean_tokens, lasttoken.",
        )
    width, own = config.get("word_embedding_dimension"), read_config(backbone).get("hidden_size")
    if isinstance(width, int) and isinstance(own, int) and width != own:
        raise EquiportError(
            f"is {width}, hidden_size of config.json is {own}",
            where=file,
            field="word_embedding_dimension",
            remedy="Give the files of one model.",
        )
    return modes[0]


def _limits(folder: Path, backbone: Path, files: tuple[Path, ...]) -> tuple[tuple[Path, ...], bool, int | None]:
    """Files read, lower case, longest prompt: of sentence_bert_config.json, where it is there."""
    for place in dict.fromkeys((backbone, folder)):
        file = place / "sentence_bert_config.json"
        if file.is_file():
            said = _json(file)
            said = said if isinstance(said, Mapping) else {}
            longest = said.get("max_seq_length")
            return (*files, file), said.get("do_lower_case") is True, longest if isinstance(longest, int) else None
    return files, False, None


def _inside(folder: Path, name: str, file: Path) -> Path:
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_dir():
        raise EquiportError(f"no such folder beside it: {name!r}", where=file, field="path", remedy="Restore it.")
    return folder / name if name else folder


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EquiportError("no such file", where=file, remedy="Download the model again.") from None
    except (OSError, ValueError) as error:
        raise EquiportError(f"is no JSON: {error}", where=file, remedy="Restore the file.") from None
