"""Windows of attentions that hold their causal mask in a buffer and take no mask for it from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery


class HeldWindow(Hypothesis):
    """The window of a held mask is missing, one off, or on the wrong layer."""

    kind = "window"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """None; the widths of the config and of the mask itself, their neighbours, halves and doubles."""
        configured = case.number("window_size", "sliding_window", "attention_window_size")
        for path, module in case.sites(Part.ATTENTION):
            held = _held(module)
            if held is None:
                continue
            name, own = held
            if own:
                yield _candidate(path, name, None, own)
            width = own or int(configured or 0)
            for size in dict.fromkeys((width, width - 1, width + 1, width // 2, width * 2)):
                if size > 0 and size != own and width:
                    yield _candidate(path, name, size, own)


def _held(module: nn.Module) -> tuple[str, int | None] | None:
    """The buffer [..., N, N] of booleans that is a causal band, and its width; None as width: no band, all before."""
    for name, mask in module.named_buffers(recurse=False):
        if mask.dtype is not torch.bool or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
            continue
        flat = mask.reshape(-1, *mask.shape[-2:])
        width = int(flat[0, -1].sum())
        if width and all(torch.equal(one, _band(one, width)) for one in flat):
            return name, width if width < mask.shape[-1] else None
    return None


def _band(mask: Tensor, width: int | None) -> Tensor:
    causal = torch.ones_like(mask).tril()
    return causal if width is None else causal & ~torch.ones_like(mask).tril(-width)


def _candidate(path: str, name: str, width: int | None, own: int | None) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        module = at.model.get_submodule(path)
        surgery.parameter(module, name, _band(module.get_buffer(name), width))

    words, theirs = (f"a window of {width}" if width else "no window"), (f"one of {own}" if own else "none")
    repair = "mask keys beyond the window" if width is None else f"use {f'a window of {own}' if own else 'no window'}"
    return Candidate(f"{path} has {words}, the source {theirs}", edit, repair)
