"""Models made one after another leave nothing behind that costs."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT

from equiport.stacks.contract import StackAdapter


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def test_loading_again_starts_no_further_threads(adapter: StackAdapter, plain_folder: Path) -> None:
    def load() -> None:
        model = adapter.create_model(PORT, CAUSAL, CONFIG, plain_folder, dtype=torch.float32, batch_size=1, seq_len=16)
        adapter.load_weights(model, plain_folder, torch.float32)

    load()
    after_one = _threads()
    for _ in range(3):
        load()
    assert _threads() <= after_one + 1
