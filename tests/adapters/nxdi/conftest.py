"""Tiny Llama folders, the example port, and the adapter on whatever tier the environment gives (stand-in or real)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import SHAPE
from transformers import LlamaConfig, LlamaForCausalLM

from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other


@pytest.fixture(scope="session")
def adapter() -> Iterator[StackAdapter]:
    made = load_adapter("nxdi")
    yield made
    made.cleanup()


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """HuggingFace folder of a tiny Llama whose weights are far from their initial values."""

    def make(**changes: Any) -> Path:
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.2) if parameter.dim() > 1 else parameter.normal_(1.0, 0.3)
        folder = tmp_path_factory.mktemp("hf")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def plain_folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder()


@pytest.fixture(scope="session")
def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, 128, (length + 6,), generator=generator).tolist() for length in (5, 17, 9)]
