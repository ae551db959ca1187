"""A component reads another token's hidden state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery


class WrongToken(Hypothesis):
    """The token before, in prefill alone or throughout; the first token."""

    kind = "wrong token"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Outputs are a function of one token here: another token's output stands in the place."""
        for path in case.sources:
            for words, by, prompt_alone in (
                ("the token before, in prefill", 1, True),
                ("the token before", 1, False),
                ("the first token", None, True),
            ):

                def edit(
                    at: Case, surgery: Surgery, path: str = path, by: int | None = by, prompt_alone: bool = prompt_alone
                ) -> None:
                    lengths = torch.tensor(at.batch.prompt_lengths)[:, None]

                    def moved(_: Tensor, out: Tensor) -> Tensor:
                        tokens = torch.arange(out.shape[1])[None].expand(out.shape[0], -1)
                        other = (tokens - by).clamp_min(0) if by is not None else torch.zeros_like(tokens)
                        places = torch.where(tokens < lengths, other, tokens) if prompt_alone else other
                        return out[torch.arange(out.shape[0])[:, None], places]

                    surgery.output(at.model.get_submodule(path), moved)

                yield Candidate(f"{path or 'the head'} reads {words}", edit, "gather each row's own last token")
