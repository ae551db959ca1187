"""Weight files are checked before a stack reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equiport.errors import EquiportError
from equiport.stacks.checkpoint import checkpoint_keys


def sharded(folder: Path) -> None:
    save_file({"a": torch.ones(3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_keys_of_one_file_and_of_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert checkpoint_keys(tmp_path) == ("a", "b")
    save_file({"z": torch.ones(3), "c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert checkpoint_keys(tmp_path) == ("c", "z")


def test_missing_shard_and_bad_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(EquiportError, match=r"index\.json: names two\.safetensors, which is missing"):
        checkpoint_keys(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(EquiportError, match="weight_map: is no checkpoint index"):
        checkpoint_keys(tmp_path)


@pytest.mark.parametrize("left", [0, 5, 60, -1])
def test_truncated(tmp_path: Path, left: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(30)}, file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(EquiportError, match=r"model\.safetensors: damaged or truncated"):
        checkpoint_keys(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="holds no weights"):
        checkpoint_keys(tmp_path)
    with pytest.raises(EquiportError, match="no such folder"):
        checkpoint_keys(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert checkpoint_keys(tmp_path) == ()
