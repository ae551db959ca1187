"""The adapter contract: what a serving stack must offer so that equiport can validate its ports.

Five methods (seed 003's adapter interface) and a few with defaults. Adapters live in `adapters/<stack>/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError


class Tier(str, Enum):
    """Where a port runs; stamped in every result."""

    DEVICE = "device"
    REAL_CPU = "real-cpu"
    STAND_IN = "stand-in"


@dataclass(frozen=True)
class StackStatus:
    """Which tier a stack gets here, and why. `version` is the stack's own; `headline` is what reports print."""

    stack: str
    tier: Tier
    name: str
    version: str
    why: str
    device: str = "cpu"

    @property
    def headline(self) -> str:
        """Where it ran, in the words of the report's headline."""
        return {
            Tier.DEVICE: f"device {self.device}",
            Tier.REAL_CPU: f"real {self.name} in CPU mode",
            Tier.STAND_IN: "on the CPU stand-in",
        }[self.tier]


@dataclass(frozen=True)
class LoadReport:
    """What a strict load found. Keys are the target's own state-dict keys."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mis_shaped: tuple[str, ...] = ()
    benign: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What the adapter had to supply so that the port could be made: never anything that changes what it computes."""
    faults: tuple[str, ...] = ()
    """What had to be done for it that the stack does not do: on a device the port loads no weights."""

    @property
    def clean(self) -> bool:
        """True when it loads by itself and nothing but the stack's benign keys is missing, unexpected or mis-shaped."""
        return not (self.missing or self.unexpected or self.mis_shaped or self.faults)


@dataclass(frozen=True)
class Generation:
    """One prompt's output from `device_inference`: `tokens` [n], `text`, `logits` [n, V] float32 or None."""

    tokens: tuple[int, ...]
    text: str = ""
    logits: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ModelLimits:
    """The shape a model was made with: rows a forward takes, and the longest sequence (prompt and new tokens)."""

    batch_size: int
    seq_len: int


class NotOffered(EquiportError):
    """The stack does not offer this optional capability."""


class StackAdapter(ABC):
    """Speaks to one serving stack. One instance serves one process; models are made and dropped one at a time."""

    name: str
    import_roots: tuple[str, ...] = ()
    """Top-level packages that a port of this stack imports; used to recognise a third-party stack's ports."""
    ragged_rows: bool = True
    """Whether modules see rows of unequal length as one right-padded batch; else components are run on equal rows."""

    @abstractmethod
    def check_environment(self, *, compiled: bool = False) -> StackStatus:
        """Which tier this stack gets here: in CPU mode, or with `compiled` for a compiled model. Imports nothing heavy.

        CPU mode on a machine with a device is still CPU mode: a result is stamped with what ran.
        """

    @abstractmethod
    def init_distributed(self, tp_degree: int = 1) -> None:
        """Put the stack on the import path and bring up its parallel state for `tp_degree` ranks. Idempotent."""

    @abstractmethod
    def create_model(
        self,
        target_module_file: str | Path,
        target_class_name: str,
        target_config_name: str,
        hf_model_path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int = 1,
        seq_len: int = 64,
        tp_degree: int = 1,
        **kw: Any,
    ) -> nn.Module:
        """Build the port's causal-LM (or inner) class, without weights, in CPU mode unless a device is asked for.

        Raises:
            EquiportError: the file does not import, has no such class, or the config lacks a field.
        """

    @abstractmethod
    def load_weights(self, model: nn.Module, hf_model_path: str | Path, dtype: torch.dtype) -> LoadReport:
        """Load the HF folder's weights through the port's own conversion, strictly; findings are reported."""

    @abstractmethod
    def forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        """Next-token logits, float32, [B, V].

        Prefill: `input_ids` [B, T] right-padded, `lengths` [B] (default: all T). Resets the rows' KV cache.
        Decode: `input_ids` [B, 1] and `positions` [B], the position of each new token (= number of prior tokens).
        B must be the batch size that the model was made with.
        """

    @abstractmethod
    def device_inference(
        self, model_id: str, tp_size: int, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **kw: Any
    ) -> list[Generation]:
        """Greedy generation of `max_tokens` for each prompt (token ids); on a compiled model, or in CPU mode."""

    @abstractmethod
    def inner_model(self, model: nn.Module) -> nn.Module:
        """The module that holds the port's layers and weights (`model` itself if it is the inner class)."""

    def limits(self, model: nn.Module) -> ModelLimits:
        """The batch size and sequence length that `create_model` made the model with.

        Raises:
            NotOffered: the adapter does not say.
        """
        raise NotOffered(f"the {self.name} adapter does not tell a model's batch size and sequence length")

    def run_notes(self, model: nn.Module) -> tuple[str, ...]:
        """What calls of `forward` so far have shown of how the port runs here; for blind spots. Default: nothing."""
        return ()

    def import_port(self, modeling_file: str | Path) -> ModuleType:
        """The port's module, imported as `create_model` will find it; patches change its classes.

        Raises:
            NotOffered: the adapter does not import ports by itself.
        """
        raise NotOffered(f"the {self.name} adapter does not offer patches")

    def source_roots(self) -> tuple[Path, ...]:
        """Folders that hold the stack's own sources here, where class branches behind imports are looked up."""
        return ()

    def cleanup(self) -> None:  # noqa: B027  # optional on purpose
        """Drop what `init_distributed` brought up. Default: nothing."""
