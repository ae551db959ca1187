"""Embeddings: ids shifted, a multiplier rounded, a row silenced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.causes.scale import figure
from equiport.localize.drafts import ScaleOutput, ShiftTokens
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_Place = Callable[[Tensor, Tensor], Tensor]
_PLACES: dict[str, _Place] = {
    "the first position": lambda tokens, lengths: torch.zeros_like(tokens),
    "the positions of a new sequence": lambda tokens, lengths: tokens - lengths,
    "positions one too small": lambda tokens, lengths: tokens - 1,
    "positions one too large": lambda tokens, lengths: tokens + 1,
    "the first row's positions": lambda tokens, lengths: tokens - lengths + lengths[0],
}


class MultiplierRounded(Hypothesis):
    """The embedding multiplier is rounded to bf16 where the source keeps it in fp32, or the other way round."""

    kind = "embedding multiplier"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One candidate where the embedding has a scale."""
        for path, module in case.sites(Part.EMBEDDING):
            scale = getattr(module, "embed_scale", None)
            exact = (case.number("hidden_size") or 0) ** 0.5
            if scale is None or not exact:
                continue
            for value, words in (
                (torch.tensor(exact).to(torch.bfloat16).item(), "rounded to bf16"),
                (exact, "not rounded to bf16"),
                (1.0, "dropped"),
            ):

                def edit(at: Case, surgery: Surgery, path: str = path, value: float = value) -> None:
                    embedding = at.model.get_submodule(path)
                    held = embedding.embed_scale
                    surgery.output(embedding, lambda _, out: out / held * value)  # type: ignore[operator]

                yield Candidate(
                    f"the embedding multiplier of {path} is {words}", edit, f"multiply by {exact:g} as the source does",
                    ScaleOutput(of=(path,), factor=figure(case, float(scale) / value)),
                )  # fmt: skip


class LearnedPositions(Hypothesis):
    """Learned positions that do not count on in decode, or are off by one."""

    kind = "position offset"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Decode tokens at the first position, one off, or at the first row's: of every table of positions."""
        for path, _ in case.sites(Part.EMBEDDING):
            if not any(mark in path.split(".")[-1] for mark in ("wpe", "position")):
                continue
            for words, place in _PLACES.items():

                def edit(at: Case, surgery: Surgery, path: str = path, place: _Place = place) -> None:
                    lengths = torch.tensor(at.batch.prompt_lengths)[:, None]

                    def moved(_: Tensor, out: Tensor) -> Tensor:
                        tokens = torch.arange(out.shape[1])[None].expand(len(lengths), -1)
                        there = torch.where(tokens < lengths, tokens, place(tokens, lengths)).clamp(0, out.shape[1] - 1)
                        rows = out.expand(len(lengths), -1, -1)
                        return rows.gather(1, there[:, :, None].expand(-1, -1, out.shape[2]))

                    surgery.output(at.model.get_submodule(path), moved)

                yield Candidate(
                    f"decode tokens have {words} in {path}", edit, "give the embedding the position ids in decode"
                )


class IdsShifted(Hypothesis):
    """Rows of neighbouring tokens are looked up."""

    kind = "token ids shifted"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One up, one down."""
        for path, _ in case.sites(Part.EMBEDDING):
            for by in (1, -1):

                def edit(at: Case, surgery: Surgery, path: str = path, by: int = by) -> None:
                    embedding = at.model.get_submodule(path)
                    count = int(embedding.num_embeddings)  # type: ignore[arg-type]
                    surgery.input(embedding, lambda ids: (ids + by) % count)

                draft = ShiftTokens(of=(path,), by=-by)
                yield Candidate(f"{path} looks up id {by:+d}", edit, "look up the token's own row", draft)
