"""The source's own embeddings in fp32 and bf16, and how far its own batches move them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equiport.compare.embeddings import Precision, distance
from equiport.errors import EquiportError
from equiport.fixtures.embedding_plan import EmbeddingPlan
from equiport.reference.embedder import Embedder, Side
from equiport.reference.embedding_alternatives import alternatives
from equiport.reference.pooling import Pooling

#: A layout of batches that moves fp32 vectors by more than this (1 - cosine) is no rounding: the class sees padding.
_ROUNDING = 1e-9
_LAYOUTS: tuple[tuple[str, tuple[Side, ...]], ...] = (("right", ("right",)), ("left", ("left", "left-own")))


@dataclass(frozen=True)
class ReferenceVectors:
    """float32 [N, D] of every prompt alone; the largest 1 - cosine between alone and batched, by precision.

    `layouts`: the sides of padding that leave the source unmoved in fp32. The noise was measured over them, and over
    the class's own attention implementations: eager alone often rounds padded batches as it rounds single rows.
    """

    bf16: Tensor
    fp32: Tensor
    noise_bf16: float
    noise_fp32: float
    layouts: tuple[str, ...]
    class_name: str
    unread: tuple[str, ...]

    def noise(self, precision: Precision) -> float:
        """Batch noise in the target's precision."""
        return self.noise_bf16 if precision == "bf16" else self.noise_fp32


def measure_reference(pooling: Pooling, plan: EmbeddingPlan) -> ReferenceVectors:
    """Run the source in fp32, then in bf16; one model is in memory at a time.

    Raises:
        EquiportError: it cannot be loaded, or its own vectors are NaN, infinite or zero.
    """
    exact = Embedder(pooling, torch.float32)
    fp32 = exact.alone(plan.items)
    sides: dict[str, Side] = {}
    noise_fp32 = 0.0
    for name, candidates in _LAYOUTS:
        for side in candidates:
            moved = _moved(exact, plan, fp32, side)
            if moved <= _ROUNDING:
                sides[name] = side
                noise_fp32 = max(noise_fp32, moved)
                break
    class_name, unread = exact.class_name, exact.unread
    del exact
    rounded = Embedder(pooling, torch.bfloat16)
    bf16 = rounded.alone(plan.items)
    noise = max((_moved(rounded, plan, bf16, side) for side in sides.values()), default=0.0)
    del rounded
    noise = max(noise, _noise_of_sdpa(pooling, plan, tuple(sides.values())))
    return ReferenceVectors(bf16, fp32, noise, noise_fp32, tuple(sides), class_name, unread)


def explain(pooling: Pooling, plan: EmbeddingPlan, target: Tensor, cosine: float) -> list[str]:
    """What the source would have to do to give the target's vectors, if one change brings every prompt to `cosine`."""
    others = alternatives(Embedder(pooling, torch.float32), plan.items)
    lowest = {name: 1 - float(distance(target, vectors).max()) for name, vectors in others.items()}
    fitting = {name: value for name, value in lowest.items() if value > cosine}
    return [
        f"the target's vectors are those of the source with {name} (cosine {value:.6f} or more for every prompt)"
        for name, value in sorted(fitting.items(), key=lambda pair: -pair[1])[:1]
    ]


def _noise_of_sdpa(pooling: Pooling, plan: EmbeddingPlan, sides: Sequence[Side]) -> float:
    """0 where the class has no such attention."""
    try:
        embedder = Embedder(pooling, torch.bfloat16, "sdpa")
    except EquiportError:
        return 0.0
    alone = embedder.alone(plan.items)
    return max((_moved(embedder, plan, alone, side) for side in sides), default=0.0)


def _moved(embedder: Embedder, plan: EmbeddingPlan, alone: Tensor, side: Side) -> float:
    rows: dict[int, Tensor] = {}
    for batch in plan.batches:
        found = embedder.embed([plan.items[row] for row in batch], side)
        rows.update(zip(batch, found, strict=True))
    batched = _ordered(rows, len(plan.items))
    return float(distance(alone, batched).max()) if torch.isfinite(batched).all() else float("inf")


def _ordered(rows: dict[int, Tensor], number: int) -> Tensor:
    return torch.stack([rows[row] for row in range(number)])
