"""A component reads another token's hidden state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery
from equiport.structure.mapping import module_of


class WrongToken(Hypothesis):
    """The token before, in prefill alone or throughout; the first token."""

    kind = "wrong token"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Outputs are a function of one token here: another token's output stands in the place."""
        for path in case.sources:
            where = "the first layer" if case.is_entry else path or "the head"
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

                    module = at.model.get_submodule(module_of(path))
                    if at.is_entry:
                        surgery.given(module, lambda hidden: moved(hidden, hidden))
                    else:
                        surgery.output(module, moved)

                yield Candidate(
                    f"{where} reads {words}",
                    edit,
                    "gather each row's own last token",
                )
