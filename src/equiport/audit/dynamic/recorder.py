"""Keeps what the port gave in the control, so that a port whose text was changed can be told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from equiport.audit.dynamic.bugs import EFFECT, EFFECT_BF16
from equiport.audit.dynamic.structures import copied, distance, tensors
from equiport.audit.dynamic.watch import PortCall, running_test

_MOST, _MOST_ELEMENTS = 48, 1_000_000


class Recorder:
    """Stores results (`then` is None), or compares with stored ones."""

    def __init__(self, file: Path, *, compare: bool) -> None:
        self.file = file
        self.then: list[tuple[str, list[torch.Tensor]]] | None = None
        self.now: list[tuple[str, list[torch.Tensor]]] = []
        if compare:
            self.then = torch.load(file, weights_only=True) if file.is_file() else []

    def call(self, call: PortCall) -> Any:
        """The result as it is, remembered."""
        out = call.result()
        found = [item for item in tensors(copied(out))]
        if found and len(self.now) < _MOST and sum(item.numel() for item in found) < _MOST_ELEMENTS:
            self.now.append((running_test(), found))
        return out

    def save(self) -> None:
        """Write what was remembered."""
        torch.save(self.now, self.file)

    def differs(self) -> set[str]:
        """Tests in which some result moved so far that they must notice."""
        found = set()
        for test in {name for name, _ in self.then or []}:
            then = [item for name, item in self.then or [] if name == test]
            now = [item for name, item in self.now if name == test]
            if len(then) != len(now) or any(_moved(one, other) for one, other in zip(now, then, strict=True)):
                found.add(test)
        return found


def _moved(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    wide = all(item.dtype is torch.float32 for item in other if item.is_floating_point())
    return distance(one, other) > (EFFECT if wide else EFFECT_BF16)
