"""Keeps what the port gave in the control, so that a port whose text was changed can be told from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from equiport.audit.dynamic.bugs import EFFECT, EFFECT_BF16
from equiport.audit.dynamic.structures import copied, distance, tensors
from equiport.audit.dynamic.watch import PortCall

_MOST, _MOST_ELEMENTS = 48, 1_000_000


class Recorder:
    """Stores results (`then` is None), or compares with stored ones."""

    def __init__(self, file: Path, *, compare: bool) -> None:
        self.file = file
        self.then: list[list[torch.Tensor]] | None = None
        self.now: list[list[torch.Tensor]] = []
        if compare:
            self.then = torch.load(file, weights_only=True) if file.is_file() else []

    def call(self, call: PortCall) -> Any:
        """The result as it is, remembered."""
        out = call.result()
        found = [item for item in tensors(copied(out))]
        if found and len(self.now) < _MOST and sum(item.numel() for item in found) < _MOST_ELEMENTS:
            self.now.append(found)
        return out

    def save(self) -> None:
        """Write what was remembered."""
        torch.save(self.now, self.file)

    def differs(self) -> bool:
        """Whether some result moved so far that a test must notice."""
        if self.then is None or len(self.then) != len(self.now):
            return self.then is not None
        for one, other in zip(self.now, self.then, strict=True):
            wide = all(item.dtype is torch.float32 for item in other if item.is_floating_point())
            if distance(one, other) > (EFFECT if wide else EFFECT_BF16):
                return True
        return False
