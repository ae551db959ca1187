"""A window's rolling cache that is read as if it were a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Edit, Hypothesis
from equiport.localize.surgery import CoreCall, Surgery, has_core


class RollingCache(Hypothesis):
    """Prefill leaves the last width - 1 tokens of the prompt, the other slots hold zeros, and decode attends them all.

    So does an attention with a window inside a model that knows of none: the model makes the mask, and the cache is
    as long as the sequence.
    """

    kind = "window"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """By the config's width; prefill without the window or with it."""
        width = int(case.number("sliding_window", "attention_window_size") or 0)
        if width < 2:
            return
        for path, module in case.sites(Part.ATTENTION):
            if not has_core(module):
                continue
            for windowed in (False, True):
                words = "the window" if windowed else "no window"
                yield Candidate(
                    f"{path} has {words} in prefill, which leaves {width - 1} tokens in the cache, and decode attends "
                    "the empty slots behind them",
                    _edit(path, width, windowed),
                    "let the model make masks and caches of the layer's window",
                )


def _edit(path: str, width: int, windowed: bool) -> Edit:
    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None, None]

        def core(call: CoreCall) -> CoreCall:
            size = call.query.shape[-2]
            query, slot = torch.arange(size)[:, None], torch.arange(size)[None]
            late, kept = query >= lengths, slot >= lengths - (width - 1)
            near = (slot > query - width) if windowed else torch.ones_like(slot <= query)
            own = (slot <= query) & torch.where(late, kept, near)
            empty = late & (slot >= width - 1) & (slot < lengths)
            seen = torch.cat((own, empty), dim=-1)
            fill = torch.finfo(call.query.dtype).min
            mask = torch.zeros(seen.shape, dtype=call.query.dtype).masked_fill(~seen, fill)[:, None]
            key, value = (torch.cat((side, torch.zeros_like(side)), dim=2) for side in (call.key, call.value))
            return replace(call, mask=mask, key=key, value=value)

        surgery.core(at.model.get_submodule(path), core)

    return edit
