"""What the source model would give if it were pooled otherwise, or attended the other way: names for faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equiport.fixtures.embedding_plan import EmbeddingItem
from equiport.reference.embedder import Embedder
from equiport.reference.pooling import PoolingMode, pool

_SAME = 1e-3


def alternatives(embedder: Embedder, items: Sequence[EmbeddingItem]) -> dict[str, Tensor]:
    """What it would be -> vectors float32 [N, D]: other tokens pooled, or attention in the other direction.

    The direction is tried only where a mask given from outside reproduces the model's own output.
    """
    found: dict[str, list[Tensor]] = {}
    for item in items:
        hidden, mask = embedder.hidden([item], "right")
        for name, vector in _pooled(hidden, mask, embedder.pooling.mode).items():
            found.setdefault(name, []).append(vector)
        turned = _other_direction(embedder, item, hidden)
        if turned is not None:
            found.setdefault(turned[0], []).append(pool(turned[1], mask, embedder.pooling.mode)[0])
    return {name: torch.stack(rows) for name, rows in found.items() if len(rows) == len(items)}


def _pooled(hidden: Tensor, mask: Tensor, own: PoolingMode) -> dict[str, Tensor]:
    others = {f"{mode.value} pooling": pool(hidden, mask, mode)[0] for mode in PoolingMode if mode is not own}
    states = hidden[0].float()
    others["the token before the last"] = states[max(len(states) - 2, 0)]
    others["the token after the first"] = states[min(1, len(states) - 1)]
    others["the largest value over tokens (max pooling)"] = states.amax(dim=0)
    if len(states) > 2:
        others["mean pooling without the first and the last token"] = states[1:-1].mean(dim=0)
    return others


def _other_direction(embedder: Embedder, item: EmbeddingItem, hidden: Tensor) -> tuple[str, Tensor] | None:
    length = len(item.ids)
    allowed = {
        "attention to the whole sequence, not to the left alone": torch.ones(length, length),
        "attention to the left alone (causal), not to the whole sequence": torch.ones(length, length).tril(),
    }
    forms: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda seen: torch.zeros_like(seen).masked_fill(seen == 0, torch.finfo(embedder.dtype).min)[None, None],
        lambda seen: seen[None],
    )
    for form in forms:
        try:
            tried = {
                name: embedder.hidden([item], "right", form(seen).to(embedder.dtype))[0]
                for name, seen in allowed.items()
            }
        except Exception:  # a class that takes no mask of this form has no such alternative
            continue
        own = [name for name, states in tried.items() if (states - hidden).norm() <= _SAME * hidden.norm()]
        if len(own) == 1:
            return next((name, states) for name, states in tried.items() if name != own[0])
    return None
