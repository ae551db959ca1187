"""Reading a folder of weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook
from safetensors.torch import load_file, save_file
from torch import Tensor

__getattr__ = attribute_hook(__name__)


def _torch_load(path: str) -> dict[str, Tensor]:
    return torch.load(path, mmap=True, map_location="cpu")


# Looked for in this order.
_FORMATS: tuple[tuple[str, Callable[[str], dict[str, Tensor]]], ...] = (
    ("model.safetensors", load_file),
    ("diffusion_pytorch_model.safetensors", load_file),
    ("model.safetensors.index.json", load_file),
    ("diffusion_pytorch_model.safetensors.index.json", load_file),
    ("pytorch_model.bin", _torch_load),
    ("pytorch_model.bin.index.json", _torch_load),
)


def load_state_dict(state_dict_dir: str) -> dict[str, Tensor]:
    """All tensors of the folder, as stored.

    Raises:
        FileNotFoundError: no weight file of a known name.
        ValueError: a sharded checkpoint holds a key twice.
    """
    for name, read in _FORMATS:
        path = os.path.join(state_dict_dir, name)
        if not os.path.isfile(path):
            continue
        if not name.endswith(".index.json"):
            return read(path)
        with open(path, encoding="utf-8") as stream:
            shards = sorted(set(json.load(stream)["weight_map"].values()))
        whole: dict[str, Tensor] = {}
        for shard in shards:
            part = read(os.path.join(state_dict_dir, shard))
            twice = whole.keys() & part.keys()
            if twice:
                raise ValueError(f"{shard} holds keys that an earlier shard holds too: {sorted(twice)[:3]}")
            whole.update(part)
        return whole
    raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {state_dict_dir}")


def save_state_dict_safetensors(state_dict: dict[str, Tensor], state_dict_dir: str, **kwargs: Any) -> None:
    """Write one model.safetensors."""
    os.makedirs(state_dict_dir, exist_ok=True)
    tensors = {key: value.contiguous() for key, value in state_dict.items()}
    save_file(tensors, os.path.join(state_dict_dir, "model.safetensors"))


def prune_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that hold None."""
    return {key: value for key, value in state_dict.items() if value is not None}
