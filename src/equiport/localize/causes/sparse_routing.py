"""Routers of their own kind whose choice is a function of the source's file: the port chooses as usual ones do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.case import Case
from equiport.localize.causes.router import _holders
from equiport.localize.hypothesis import Candidate, Edit, Hypothesis
from equiport.localize.surgery import Surgery

#: Functions of (logits [tokens, experts], ...) that give (weights, chosen), each [tokens, k].
_CHOICES = ("sparsemixer",)


class UsualChoice(Hypothesis):
    """Softmax or sigmoid and top-k, in place of a choice that masks and weighs one expert after the other."""

    kind = "router order or renormalisation"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Over all experts or the chosen ones alone; and without the mask."""
        for path in _holders(case, "top_k"):
            name = next((one for one in _CHOICES if hasattr(_file(case, path), one)), None)
            if name is None:
                continue
            for words, form in _FORMS.items():
                yield Candidate(
                    f"{path} weighs its experts by {words}, the source by {name}",
                    _edit(path, name, form), f"choose and weigh experts by {name}",
                )  # fmt: skip


def _file(case: Case, path: str) -> Any:
    return sys.modules[type(case.model.get_submodule(path)).__module__]


def _softmax_all(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return tuple(logits.float().softmax(dim=-1).topk(count, dim=-1))  # type: ignore[return-value]


def _softmax_chosen(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best, chosen = logits.float().topk(count, dim=-1)
    return best.softmax(dim=-1), chosen


def _sigmoid(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best, chosen = logits.float().topk(count, dim=-1)
    return best.sigmoid(), chosen


def _sigmoid_normed(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    weights, chosen = _sigmoid(logits, count)
    return weights / weights.sum(dim=-1, keepdim=True), chosen


def _one_by_one(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each expert's share among those that are left, unmasked."""
    left, weights, places = logits.float(), [], []
    for _ in range(count):
        share, place = left.softmax(dim=-1).max(dim=-1, keepdim=True)
        weights.append(share)
        places.append(place)
        left = left.scatter(-1, place, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(places, dim=-1)


def _ones(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best, chosen = logits.float().topk(count, dim=-1)
    return torch.ones_like(best), chosen


_Form = Callable[[Tensor, int], tuple[Tensor, Tensor]]
_FORMS: dict[str, _Form] = {
    "a softmax over all of them": _softmax_all,
    "a softmax over the chosen ones": _softmax_chosen,
    "a sigmoid": _sigmoid,
    "a sigmoid, renormalised": _sigmoid_normed,
    "their shares one after the other, with no mask": _one_by_one,
    "one": _ones,
}


def _edit(path: str, name: str, form: _Form) -> Edit:
    def edit(at: Case, surgery: Surgery) -> None:
        block: nn.Module = at.model.get_submodule(path)
        count = int(block.top_k)  # type: ignore[arg-type]

        def chosen(scores: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            weights, places = form(scores, count)
            return weights.to(scores.dtype), places

        surgery.attribute(_file(at, path), name, chosen)

    return edit
