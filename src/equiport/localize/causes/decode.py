"""Decode alone is wrong: another scale or cap, slots of zeros, other rows' cache lines, positions from zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import CoreCall, RotaryCall, Surgery, has_core, has_rotation

Plain = Callable[[RotaryCall], tuple[Tensor, Tensor]]
Shown = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(query [T, 1], key [1, T], prompt lengths [B, 1, 1]) -> own keys seen, foreign keys seen, each [B or 1, T, T]."""


def _cores(case: Case) -> Iterable[tuple[str, nn.Module]]:
    return ((path, module) for path, module in case.sites(Part.ATTENTION) if has_core(module))


def _lengths(case: Case) -> Tensor:
    return torch.tensor(case.batch.prompt_lengths)[:, None, None]


def _late(case: Case, size: int) -> Tensor:
    """Which tokens are decoded: [B, 1, T, 1]."""
    return (torch.arange(size)[None, :] >= _lengths(case)[:, :, 0])[:, None, :, None]


class DecodeScale(Hypothesis):
    """The scores of decode are scaled otherwise than those of prefill."""

    kind = "softmax scale"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The usual conventions."""
        for path, module in _cores(case):
            own = float(getattr(module, "scaling", 0.0) or 0.0)
            head = float(getattr(module, "head_dim", 0) or case.number("head_dim") or 0)
            if not own or not head:
                continue
            usual = {"head_dim**-0.5": head**-0.5, "1 (left out)": 1.0, "1/scale (inverted)": 1 / own}
            for words, value in usual.items():
                if abs(value / own - 1) < 1e-6:
                    continue

                def edit(at: Case, surgery: Surgery, path: str = path, ratio: float = value / own) -> None:
                    def core(call: CoreCall) -> CoreCall:
                        late = _late(at, call.query.shape[-2])
                        return replace(call, query=torch.where(late, call.query * ratio, call.query))

                    surgery.core(at.model.get_submodule(path), core)

                yield Candidate(
                    f"scores of {path} in decode are scaled by {words} = {value:.6g}, the source's {own:.6g}", edit,
                    f"scale them by {own:.8g} in decode too",
                )  # fmt: skip


class DecodeSoftcap(Hypothesis):
    """Scores of decode, all or the new token's own, are not capped."""

    kind = "softcap"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Where the source caps them."""
        cap = case.number("attn_logit_softcapping")
        if not cap:
            return
        for path, _ in _cores(case):
            for words, own_alone in (("the new token's own score is", True), ("no score of decode is", False)):

                def edit(at: Case, surgery: Surgery, path: str = path, own_alone: bool = own_alone) -> None:
                    def core(call: CoreCall) -> CoreCall:
                        groups = call.query.shape[1] // call.key.shape[1]
                        key = call.key.repeat_interleave(groups, dim=1)
                        raw = call.query @ key.transpose(2, 3) * call.options["scaling"]
                        size = raw.shape[-1]
                        chosen = _late(at, size) & (
                            torch.eye(size, dtype=torch.bool) if own_alone else torch.tensor(True)
                        )
                        more = (raw - cap * torch.tanh(raw / cap)) * chosen
                        return replace(call, mask=more if call.mask is None else call.mask + more)

                    surgery.core(at.model.get_submodule(path), core)

                yield Candidate(
                    f"{words} {'not ' if own_alone else ''}capped in decode in {path}",
                    edit,
                    f"cap the scores at {cap:g}",
                )


class OnePhaseWindow(Hypothesis):
    """The window holds in one phase alone."""

    kind = "window"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Prefill without it; decode without it; on layers that have one."""
        width = case.number("sliding_window", "attention_window_size")
        for path, module in _cores(case):
            if not width or getattr(module, "sliding_window", width) is None:
                continue
            for phase in ("prefill", "decode"):

                def edit(at: Case, surgery: Surgery, path: str = path, phase: str = phase) -> None:
                    def core(call: CoreCall) -> CoreCall:
                        size = call.query.shape[-2]
                        query, key = torch.arange(size)[:, None], torch.arange(size)[None]
                        late = _late(at, size)
                        free = late if phase == "decode" else ~late
                        seen = (key <= query) & (free | (key > query - int(width)))
                        fill = torch.finfo(call.query.dtype).min
                        return replace(
                            call, mask=torch.zeros(seen.shape, dtype=call.query.dtype).masked_fill(~seen, fill)
                        )

                    surgery.core(at.model.get_submodule(path), core)

                yield Candidate(
                    f"{path} has no window in {phase}, the source one of {int(width)}",
                    edit,
                    "mask keys beyond the window",
                )


def _shown(path: str, says: str, shown: Shown, foreign: Callable[[Tensor], Tensor], repair: str) -> Candidate:
    """Attention over each row's own keys and over foreign ones, as `shown` lets them be seen."""

    def edit(at: Case, surgery: Surgery) -> None:
        lengths = _lengths(at)

        def core(call: CoreCall) -> CoreCall:
            size = call.query.shape[-2]
            query, key = torch.arange(size)[:, None], torch.arange(size)[None]
            seen = torch.cat([part.expand(len(lengths), size, size) for part in shown(query, key, lengths)], dim=-1)
            own = call.mask
            fill = torch.finfo(call.query.dtype).min
            mask = torch.zeros(seen.shape, dtype=call.query.dtype).masked_fill(~seen, fill)[:, None]
            if own is not None:
                mask = torch.minimum(mask, torch.cat((own, own), dim=-1))
            return replace(
                call, mask=mask,
                key=torch.cat((call.key, foreign(call.key)), dim=2),
                value=torch.cat((call.value, foreign(call.value)), dim=2),
            )  # fmt: skip

        surgery.core(at.model.get_submodule(path), core)

    return Candidate(says, edit, repair)


class StaleSlots(Hypothesis):
    """A slot of the cache was never written, and its zeros are attended."""

    kind = "state not carried in decode"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The slot before the new token; the prompt's last; its first."""
        slots: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "the slot before the new token": lambda q, k, n: (q >= n) & (k == q - 1)[None],
            "the slot of the prompt's last token": lambda q, k, n: (q >= n) & (k == n - 1),
            "the slot of the first token": lambda q, k, n: (q >= n) & (k == 0)[None],
        }
        for path, _ in _cores(case):
            for words, chosen in slots.items():

                def shown(q: Tensor, k: Tensor, n: Tensor, chosen: object = chosen) -> tuple[Tensor, Tensor]:
                    empty = chosen(q, k, n)  # type: ignore[operator]
                    return (k <= q)[None] & ~empty, empty

                yield _shown(
                    path, f"{words} holds zeros in decode in {path}", shown, torch.zeros_like, "write the whole cache"
                )


class OtherRows(Hypothesis):
    """Decode reads another row's cache lines, and its own new key and value."""

    kind = "batch row mixed up"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The next row's, the first row's, the mirrored row's; with its own new token or without."""
        rows = case.batch.batch_size
        if rows < 2:
            return
        orders = {"the first row's": [0] * rows, "the mirrored row's": list(range(rows))[::-1]}
        if rows > 2:
            orders["the next row's"] = [(row + 1) % rows for row in range(rows)]
        for path, _ in _cores(case):
            for words, order in orders.items():

                def exchanged(at: Case, surgery: Surgery, path: str = path, order: list[int] = order) -> None:
                    surgery.output(at.model.get_submodule(path), lambda _, out: out[order])

                yield Candidate(f"the rows that come out of {path} are {words}", exchanged, "keep the rows' order")
                for own_new in (True, False):

                    def shown(q: Tensor, k: Tensor, n: Tensor, own_new: bool = own_new) -> tuple[Tensor, Tensor]:
                        late = q >= n
                        new = (k == q)[None] if own_new else torch.zeros_like((k == q)[None])
                        return ~late & (k <= q)[None] | late & new, late & (k <= q)[None] & ~new

                    yield _shown(
                        path, f"cache lines of decode in {path} are {words}", shown, _taken(order),
                        "keep each row's own cache lines",
                    )  # fmt: skip


def _taken(order: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda rows: rows[order]


class Restart(Hypothesis):
    """Positions start again in decode."""

    kind = "position offset"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Always zero; counted from zero."""
        for path, module in case.sites(Part.ATTENTION):
            if not has_rotation(module):
                continue
            for words, counted in (("is 0", False), ("is counted from 0", True)):

                def edit(at: Case, surgery: Surgery, path: str = path, counted: bool = counted) -> None:
                    lengths = _lengths(at)[:, 0]

                    def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
                        tokens = torch.arange(call.query.shape[-2])[None].expand(len(lengths), -1)
                        positions = torch.where(tokens >= lengths, (tokens - lengths) * counted, tokens)
                        return plain(replace(call, cos=call.cos[0][positions], sin=call.sin[0][positions]))

                    surgery.rotation(at.model.get_submodule(path), form)

                yield Candidate(f"the position in decode {words} in {path}", edit, "count positions on in decode")
