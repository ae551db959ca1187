"""Two gloo ranks, with sizes that two does not divide: five heads, one key/value head, odd widths."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from tiers import relative_l2, why_no_real_tier  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with an odd vocabulary, MLP and head count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 40, "intermediate_size": 49, "num_hidden_layers": 2, "head_dim": 8}
    config = LlamaConfig(**sizes, num_attention_heads=5, num_key_value_heads=1, pad_token_id=0)
    model = LlamaForCausalLM(config)
    for param in model.parameters():
        param.data.normal_(0, param.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def _run(tier: str, ranks: int, checkpoint: Path, out: Path) -> dict[str, Tensor]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(HERE / "ranks.py"), tier, str(ranks), str(checkpoint), str(out)]
    running = [
        subprocess.Popen(command, env={**world, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert out.is_file(), errors[0][-2000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The session on two ranks of the stand-in."""
    return _run("standin", 2, checkpoint, tmp_path_factory.mktemp("two") / "out.pt")


def test_two_ranks_compute_what_one_does(two: dict[str, Tensor], checkpoint: Path, tmp_path: Path) -> None:
    one = _run("standin", 1, checkpoint, tmp_path / "out.pt")
    assert two.keys() == one.keys()
    for key, value in two.items():
        assert relative_l2(value[..., :-1], one[key][..., :-1]) < 1e-5, key
    assert sum(key.startswith("moe") for key in two) == 3


def test_the_last_token_of_a_padded_vocabulary_is_masked(two: dict[str, Tensor]) -> None:
    """As on the real stack: the head cuts its padding off, and then as many real tokens are masked."""
    for value in (value for key, value in two.items() if not key.startswith("moe")):
        assert value.shape[-1] == 61
        assert bool((value[..., -1] == torch.finfo(torch.float32).min).all())


@pytest.mark.skipif(bool(why_no_real_tier()), reason=why_no_real_tier())
def test_two_ranks_answer_as_the_real_stack(two: dict[str, Tensor], checkpoint: Path, tmp_path: Path) -> None:
    real = _run("real", 2, checkpoint, tmp_path / "out.pt")
    assert two.keys() == real.keys()
    for key, value in two.items():
        assert relative_l2(value[..., :-1], real[key][..., :-1]) <= 1e-6, key
        # a masked column, or one of a head that is not padded
        assert torch.equal(value[..., -1], real[key][..., -1]) or relative_l2(value, real[key]) <= 1e-6, key
