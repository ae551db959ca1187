"""The tiny models and the judgement of the families bench, as tests use them."""

from __future__ import annotations

from pathlib import Path

import transformers

from equiport.bench.family_check import judge, logits_error
from equiport.bench.family_models import FAMILIES, VARIANTS, write_model

__all__ = ["FAMILIES", "VARIANTS", "cannot_build", "judge", "logits_error", "make_model"]
_NOT_IN_4 = {"stablelm parallel, head norms": "its initialisation zeroes a bias that head norms lack"}


def cannot_build(name: str) -> str:
    """Why the installed transformers cannot build this family's model; empty where it can."""
    return _NOT_IN_4.get(name, "") if transformers.__version__.startswith("4.") else ""


def make_model(name: str, root: Path) -> Path:
    """The HF folder of a family's tiny model below `root`, with perturbed weights."""
    return write_model(name, root / "model")
