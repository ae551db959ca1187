"""The tiny models and the judgement of the families bench, as tests use them."""

from __future__ import annotations

from pathlib import Path

from equiport.bench.family_check import judge, logits_error
from equiport.bench.family_models import FAMILIES, VARIANTS, write_model

__all__ = ["FAMILIES", "VARIANTS", "judge", "logits_error", "make_model"]


def make_model(name: str, root: Path) -> Path:
    """The HF folder of a family's tiny model below `root`, with perturbed weights."""
    return write_model(name, root / "model")
