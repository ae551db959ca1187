"""Experts in another order; weights of the chosen by another formula; groups; a gate clamped on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(router logits [N, E], correction [E], chosen [N, k]) -> weights [N, k]."""


class ExpertOrder(Hypothesis):
    """The weights of another expert stand in each place."""

    kind = "expert order"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Moved by one either way, or reversed; all of an expert's tensors, or each alone."""
        for path, module in case.sites(Part.EXPERTS):
            names = [name for name, value in module._parameters.items() if value is not None and value.dim() >= 2]
            for group in [names, *([name] for name in names)] if len(names) > 1 else [names]:
                for words, order in (("moved by one", "next"), ("moved by one", "previous"), ("reversed", "reversed")):

                    def edit(
                        at: Case, surgery: Surgery, path: str = path, group: list[str] = group, order: str = order
                    ) -> None:
                        owner = at.model.get_submodule(path)
                        for name in group:
                            value: Any = getattr(owner, name)
                            moved = {
                                "next": lambda v: v.roll(-1, 0), "previous": lambda v: v.roll(1, 0),
                                "reversed": lambda v: v.flip(0),
                            }[order](value.detach())  # fmt: skip
                            surgery.parameter(owner, name, moved.clone())

                    yield Candidate(
                        f"{', '.join(group)} of {path} stand for other experts ({words}, {order})", edit,
                        "keep the order of the experts",
                    )  # fmt: skip


def _renormalised(weights: Tensor) -> Tensor:
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)


_FORMULAS: dict[str, Weigh] = {
    "softmax over all": lambda logits, _, chosen: logits.softmax(-1).gather(1, chosen),
    "softmax over the chosen": lambda logits, _, chosen: logits.gather(1, chosen).softmax(-1),
    "sigmoids": lambda logits, _, chosen: logits.sigmoid().gather(1, chosen),
    "sigmoids, renormalised": lambda logits, _, chosen: _renormalised(logits.sigmoid().gather(1, chosen)),
    "logits": lambda logits, _, chosen: logits.gather(1, chosen),
    "equal": lambda logits, _, chosen: torch.full_like(logits.gather(1, chosen), 1 / chosen.shape[1]),
}
_CORRECTED: dict[str, Weigh] = {
    "corrected sigmoids": lambda logits, bias, chosen: (logits.sigmoid() + bias).gather(1, chosen),
    "corrected sigmoids, renormalised": lambda logits, bias, chosen: _renormalised(
        (logits.sigmoid() + bias).gather(1, chosen)
    ),
}


class Weights(Hypothesis):
    """The chosen experts are the source's, their weights follow another formula."""

    kind = "router order or renormalisation"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The usual formulas, times the routed scaling where there is one."""
        yield from _weighed(case, _FORMULAS)
        for path, module in case.sites(Part.ROUTER):
            for name in ("topk_group",):
                own, groups = getattr(module, name, None), getattr(module, "num_group", None)
                if isinstance(own, int) and isinstance(groups, int):
                    for value in {1, groups} - {own}:

                        def edit(at: Case, surgery: Surgery, path: str = path, value: int = value) -> None:
                            surgery.attribute(at.model.get_submodule(path), "topk_group", value)

                        yield Candidate(
                            f"{path} chooses from {value} of {groups} groups, the source from {own}", edit,
                            f"choose from {own} groups",
                        )  # fmt: skip


class CorrectedWeights(Hypothesis):
    """The correction bias weighs the experts, where it should only choose them."""

    kind = "correction bias"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On routers that have one."""
        yield from _weighed(case, _CORRECTED)


def _weighed(case: Case, formulas: Mapping[str, Weigh]) -> Iterable[Candidate]:
    for path, module in case.sites(Part.ROUTER):
        correction = getattr(module, "e_score_correction_bias", None)
        if not isinstance(getattr(module, "weight", None), Tensor):
            continue
        if formulas is _CORRECTED and not isinstance(correction, Tensor):
            continue
        for words, weigh in formulas.items():

            def edit(at: Case, surgery: Surgery, path: str = path, weigh: Weigh = weigh) -> None:
                router: Any = at.model.get_submodule(path)
                original = router.forward
                scaling = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)

                def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                    logits, weights, chosen = original(x, *args, **kwargs)
                    bias = getattr(router, "e_score_correction_bias", torch.zeros(logits.shape[-1]))
                    return logits, (weigh(logits.float(), bias, chosen) * scaling).to(weights.dtype), chosen

                surgery.forward(router, forward)

            yield Candidate(f"the weights of the experts in {path} are {words}", edit, "weigh as the source does")


class GateClamp(Hypothesis):
    """The gate of the oai form is clamped from below too, or up is not clamped."""

    kind = "clamp"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On modules with that form."""
        for path, module in case.sites(Part.EXPERTS):
            if not (hasattr(module, "_apply_gate") and hasattr(module, "limit") and hasattr(module, "alpha")):
                continue
            for words, gate_low, up_clamped in (
                ("the gate is clamped from below too", True, True),
                ("up is not clamped", False, False),
            ):

                def edit(
                    at: Case,
                    surgery: Surgery,
                    path: str = path,
                    gate_low: bool = gate_low,
                    up_clamped: bool = up_clamped,
                ) -> None:
                    owner: Any = at.model.get_submodule(path)

                    def gated(both: Tensor) -> Tensor:
                        gate, up = both[..., ::2], both[..., 1::2]
                        gate = gate.clamp(-owner.limit if gate_low else None, owner.limit)
                        up = up.clamp(-owner.limit, owner.limit) if up_clamped else up
                        return (up + 1) * gate * torch.sigmoid(gate * owner.alpha)  # type: ignore[no-any-return]

                    surgery.attribute(owner, "_apply_gate", gated)

                yield Candidate(f"{words} in {path}", edit, "clamp as the source does")
