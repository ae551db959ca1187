"""Embeddings: ids shifted, a multiplier rounded, a row silenced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.causes.scale import figure
from equiport.localize.drafts import ScaleOutput, ShiftTokens
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery


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
