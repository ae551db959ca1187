"""Pooling is read or said, never guessed; padding on either side does not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equiport.errors import EquiportError
from equiport.reference.pooling import PoolingMode, pool, read_pooling

ST = "sentence_transformers.models."


def folder(root: Path, modules: list[tuple[str, str]] | None, pooling: dict[str, Any] | None, **more: Any) -> Path:
    """A model folder with sentence-transformers files: (path, kind) of modules, and the pooling's config."""
    (root / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    if modules is not None:
        (root / "modules.json").write_text(
            json.dumps([{"idx": n, "path": path, "type": ST + kind} for n, (path, kind) in enumerate(modules)])
        )
        for path, _ in modules:
            (root / path).mkdir(exist_ok=True)
    if pooling is not None:
        (root / "1_Pooling").mkdir(exist_ok=True)
        (root / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, value in more.items():
        (root / f"{name}.json").write_text(json.dumps(value))
    return root


PLAIN = [("", "Transformer"), ("1_Pooling", "Pooling")]
NORMAL = [*PLAIN, ("2_Normalize", "Normalize")]


@pytest.mark.parametrize(
    ("modules", "pooling", "mode", "normalize"),
    [
        (PLAIN, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, PoolingMode.MEAN, False),
        (NORMAL, {"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, PoolingMode.CLS, True),
        (NORMAL, {"pooling_mode_lasttoken": True, "include_prompt": True}, PoolingMode.LAST, True),
        (NORMAL, {"pooling_mode": "lasttoken"}, PoolingMode.LAST, True),
    ],
)
def test_files_are_read(
    tmp_path: Path, modules: list[tuple[str, str]], pooling: dict[str, Any], mode: PoolingMode, normalize: bool
) -> None:
    found = read_pooling(folder(tmp_path, modules, pooling))
    assert (found.mode, found.normalize, found.origin) == (mode, normalize, "the folder's files")
    assert {file.name for file in found.files} == {"modules.json", "config.json"}


def test_a_backbone_in_a_folder_of_its_own(tmp_path: Path) -> None:
    model = folder(tmp_path, [("0_Transformer", "Transformer"), PLAIN[1]], {"pooling_mode_mean_tokens": True})
    (model / "config.json").rename(model / "0_Transformer" / "config.json")
    (model / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    found = read_pooling(model)
    assert (found.backbone, found.longest, found.lower_case) == (model / "0_Transformer", 9, True)


@pytest.mark.parametrize(
    ("modules", "pooling", "arguments", "said"),
    [
        (None, None, {}, "--pooling: is said by no file"),
        (None, None, {"mode": PoolingMode.LAST}, "--normalize: is said by no file"),
        (None, {"pooling_mode_mean_tokens": True}, {}, "--normalize: is said by no file"),
        (NORMAL, {"pooling_mode_mean_tokens": True}, {"normalize": False}, "files say True, the flag says False"),
        (NORMAL, {"pooling_mode_mean_tokens": True}, {"mode": PoolingMode.CLS}, "files say mean, the flag says cls"),
        (NORMAL, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, {}, "pooling_mode_cls_token"),
        (NORMAL, {"pooling_mode_max_tokens": True}, {}, "pooling modes: pooling_mode_max_tokens"),
        (NORMAL, {"pooling_mode_mean_tokens": False}, {}, "pooling modes: none"),
        (NORMAL, {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 9}, {}, "is 9, hidden_size"),
        (NORMAL, None, {}, "no such file"),
        ([*PLAIN, ("2_Dense", "Dense")], {"pooling_mode_mean_tokens": True}, {}, "Dense are not offered"),
        ([("", "Transformer")], None, {}, "modules Transformer are not offered"),
    ],
)
def test_what_is_not_said_or_contradicts_is_an_error(
    tmp_path: Path, modules: Any, pooling: Any, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(EquiportError, match=said):
        read_pooling(folder(tmp_path, modules, pooling), **arguments)


def test_modules_outside_the_folder_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    with pytest.raises(EquiportError, match="no such folder beside it"):
        read_pooling(folder(root, [("..", "Transformer"), PLAIN[1]], {"pooling_mode_mean_tokens": True}))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.sampled_from(PoolingMode), st.integers(0, 3))
def test_padding_on_either_side_does_not_matter(lengths: list[int], mode: PoolingMode, extra: int) -> None:
    torch.manual_seed(sum(lengths))
    rows = [torch.randn(length, 5) for length in lengths]
    wanted = {
        PoolingMode.LAST: torch.stack([row[-1] for row in rows]),
        PoolingMode.CLS: torch.stack([row[0] for row in rows]),
        PoolingMode.MEAN: torch.stack([row.mean(0) for row in rows]),
    }[mode]
    width = max(lengths) + extra
    for left in (False, True):
        hidden = torch.full((len(rows), width, 5), float("nan"))
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for number, row in enumerate(rows):
            start = width - len(row) if left else 0
            hidden[number, start : start + len(row)] = row
            mask[number, start : start + len(row)] = 1
        torch.testing.assert_close(pool(hidden, mask, mode), wanted, rtol=0, atol=1e-6)
