"""Masks and state: window, causality, padding, cache, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import CoreCall, Surgery, has_core

Allowed = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query positions [T, 1], key positions [1, T], prompt lengths [B, 1, 1]) -> who may be seen, [B or 1, T, T]."""


def _masked(path: str, says: str, allowed: Allowed, repair: str) -> Candidate:
    """The attention with a mask of its own making; key slots are token positions, as in the source."""

    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None, None]

        def core(call: CoreCall) -> CoreCall:
            size = call.query.shape[-2]
            query, key = torch.arange(size)[:, None], torch.arange(size)[None]
            seen = allowed(query, key, lengths).expand(len(lengths), size, size)
            fill = torch.finfo(call.query.dtype).min
            mask = torch.zeros(seen.shape, dtype=call.query.dtype).masked_fill(~seen, fill)
            return replace(call, mask=mask[:, None])

        surgery.core(at.model.get_submodule(path), core)

    return Candidate(says, edit, repair)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query)[None]


def _attentions(case: Case) -> Iterable[tuple[str, nn.Module]]:
    return ((path, module) for path, module in case.sites(Part.ATTENTION) if has_core(module))


def _within(query: Tensor, key: Tensor, _: Tensor, size: int) -> Tensor:
    return _causal(query, key) & (key > query - size)[None]


class Window(Hypothesis):
    """The sliding window is missing, one off, or on the wrong layer."""

    kind = "window"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """None; the configured width and its neighbours, halves and doubles."""
        width = case.number("sliding_window", "attention_window_size")
        if not width:
            return
        for path, module in _attentions(case):
            own = getattr(module, "sliding_window", _from_config(case, path, width))
            own = int(own) if isinstance(own, (int, float)) and own else None
            if own:
                yield _masked(
                    path, f"{path} has no window, the source one of {own}",
                    lambda q, k, _: _causal(q, k), "mask keys beyond the window",
                )  # fmt: skip
            for size in dict.fromkeys((int(width), int(width) - 1, int(width) + 1, int(width) // 2, int(width) * 2)):
                if size != own and size > 0:
                    yield _masked(
                        path, f"{path} has a window of {size}, the source {own or 'none'}",
                            partial(_within, size=size),
                        f"use a window of {own}" if own else "use no window in this layer",
                    )  # fmt: skip


def _from_config(case: Case, path: str, width: float) -> float | None:
    """The window of an attention that does not hold it: its layer's, by the config's list of kinds."""
    kinds = getattr(case.config, "layer_types", None)
    place = next((int(step) for step in path.split(".") if step.isdigit()), None)
    if not kinds or place is None or place >= len(kinds):
        return width
    return width if "sliding" in kinds[place] else None


class Causality(Hypothesis):
    """Tokens see too much or too little."""

    kind = "mask"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """No mask at all; the token itself hidden; padding seen; in prefill and in decode."""
        forms: dict[str, Allowed] = {
            "no causal mask in prefill": lambda q, k, n: _causal(q, k) | ((q < n) & (k < n)),
            "no mask at all": lambda q, k, n: torch.ones_like(_causal(q, k)),
            "a mask that hides the token itself": lambda q, k, n: _causal(q, k) & ((k < q) | (q == 0))[None],
            "a mask that hides the token itself in prefill": lambda q, k, n: (
                _causal(q, k) & ((k < q)[None] | (q == 0)[None] | (q >= n))
            ),
            "a mask that shows the next token": lambda q, k, n: (k <= q + 1)[None],
            "a mask that shows the next token in prefill": (
                lambda q, k, n: _causal(q, k) | ((q < n) & (k < n) & (k <= q + 1))
            ),
            "a mask that hides the token itself in decode": lambda q, k, n: _causal(q, k) & ((q < n) | (k < q)[None]),
            "a mask that hides the first token": lambda q, k, n: _causal(q, k) & ((k > 0) | (q == 0))[None],
        }  # fmt: skip
        for path, _ in _attentions(case):
            for words, allowed in forms.items():
                yield _masked(path, f"{path} works with {words}", allowed, "mask as the source does")


class State(Hypothesis):
    """What prefill left is lost, partly lost, or another row's in decode."""

    kind = "state not carried in decode"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The prompt not seen; its last token not seen; earlier decode tokens not seen."""
        forms: dict[str, Allowed] = {
            "do not see the prompt": lambda q, k, n: _causal(q, k) & ((q < n) | (k >= n)),
            "see only themselves": lambda q, k, n: _causal(q, k) & ((q < n) | (k == q)[None]),
            "do not see the prompt's last token": lambda q, k, n: _causal(q, k) & ((q < n) | (k != n - 1)),
            "do not see earlier decode tokens": lambda q, k, n: _causal(q, k) & ((q < n) | (k < n) | (k == q)[None]),
            "do not see the token before": lambda q, k, n: _causal(q, k) & ((q < n) | (k != q - 1)[None]),
            "do not see the prompt's first token": lambda q, k, n: _causal(q, k) & ((q < n) | (k > 0)[None]),
        }  # fmt: skip
        for path, _ in _attentions(case):
            for words, allowed in forms.items():
                yield _masked(path, f"decode tokens of {path} {words}", allowed, "write and read the whole cache")


class Rows(Hypothesis):
    """Rows of the batch are mixed up."""

    kind = "batch row mixed up"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Keys and values, or whole outputs, of the next or the mirrored row; in both phases or in decode alone."""
        rows = case.batch.batch_size
        if rows < 2:
            return
        orders = {"the next row's": [(row + 1) % rows for row in range(rows)], "the first row's": [0] * rows}
        orders["the mirrored row's"] = list(range(rows))[::-1]
        for path, _ in _attentions(case):
            for words, order in orders.items():
                for decode in (False, True):
                    yield _mixed(path, words, order, decode)


def _mixed(path: str, words: str, order: list[int], decode: bool) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None, None]

        def core(call: CoreCall) -> CoreCall:
            if len(order) != call.key.shape[0] or decode:
                return call
            return replace(call, key=call.key[order], value=call.value[order])

        def output(hidden: Tensor, out: Tensor) -> Tensor:
            if not decode or len(order) != out.shape[0]:
                return out
            late = torch.arange(out.shape[1])[None, :, None] >= lengths
            return torch.where(late, out[order], out)

        attention = at.model.get_submodule(path)
        surgery.core(attention, core)
        surgery.output(attention, output)

    where = "outputs of decode" if decode else "keys and values"
    return Candidate(f"{where} of {path} are {words}", edit, "keep each row's own cache lines")
