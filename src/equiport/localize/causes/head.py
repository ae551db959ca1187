"""The way from the head's input to the logits: softcap, tie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.drafts import OwnWeights
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_CAPS = ("final_logit_softcapping", "logits_soft_cap")


class FinalSoftcap(Hypothesis):
    """The cap on the logits is missing, or another one."""

    kind = "softcap"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Dropped, applied twice, the attention's value; where the source has one."""
        name = next((key for key in _CAPS if case.number(key)), "")
        own = case.number(name) if name else None
        if not own or case.sources != ("",):
            return
        for value in (None, case.number("attn_logit_softcapping"), 50.0, 30.0):
            if value != own:

                def edit(at: Case, surgery: Surgery, value: float | None = value) -> None:
                    # a source that always caps gets a cap that nothing reaches
                    gone = None if name == _CAPS[0] else 1e6
                    surgery.attribute(at.config, name, gone if value is None else value)

                yield Candidate(
                    f"the softcap of the logits is {value or 'missing'}, the source's {own:g}", edit,
                    f"cap the logits at {own:g}",
                )  # fmt: skip

        def twice(at: Case, surgery: Surgery) -> None:
            surgery.output(at.model, lambda _, out: own * torch.tanh(out / own))

        yield Candidate("the softcap of the logits is applied twice", twice, "cap the logits once")


class Tie(Hypothesis):
    """The head uses the embedding's weight where the source has its own."""

    kind = "tie"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On the output projection of an untied model."""
        model: Any = case.model
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or not any(module is head for _, module in case.sites(Part.LINEAR)):
            return

        def edit(at: Case, surgery: Surgery) -> None:
            other: Any = at.model
            weight = other.get_input_embeddings().weight
            surgery.parameter(other.get_output_embeddings(), "weight", weight.detach().clone())

        names = {module: path for path, module in case.model.named_modules()}
        draft = OwnWeights(of=(names[head],), other=names[model.get_input_embeddings()])
        yield Candidate("the head uses the embedding's weight", edit, "load lm_head.weight", draft)
