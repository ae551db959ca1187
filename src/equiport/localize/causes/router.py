"""Mixtures of experts: router order, renormalisation, scaling, correction bias, shared experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery


def _holders(case: Case, name: str) -> list[str]:
    """Paths at or inside the suspect whose module has this attribute."""
    return [path for path, module in case.sites(*Part) if hasattr(module, name)]


def _held(case: Case, path: str, name: str) -> Any:
    return getattr(case.model.get_submodule(path), name)


class Renormalisation(Hypothesis):
    """The chosen weights are renormalised where the source does not, or the reverse; softmax after top-k."""

    kind = "router order or renormalisation"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """norm_topk_prob turned round; more or fewer experts; a sigmoid for a softmax."""
        for path in _holders(case, "norm_topk_prob"):
            own = case.model.get_submodule(path).norm_topk_prob

            def toggle(at: Case, surgery: Surgery, path: str = path, own: Any = own) -> None:
                surgery.attribute(at.model.get_submodule(path), "norm_topk_prob", not own)

            yield Candidate(
                f"the router weights of {path} are {'not ' if own else ''}renormalised (softmax after top-k)", toggle,
                f"norm_topk_prob is {bool(own)}",
            )  # fmt: skip
        for path in _holders(case, "top_k"):
            chosen = int(_held(case, path, "top_k"))
            for value in {chosen - 1, chosen + 1} - {0}:

                def count(at: Case, surgery: Surgery, path: str = path, value: int = value) -> None:
                    surgery.attribute(at.model.get_submodule(path), "top_k", value)

                yield Candidate(f"{path} chooses {value} experts, the source {chosen}", count, f"choose {chosen}")


class RoutedScaling(Hypothesis):
    """The factor on the routed experts is dropped, applied twice, inverted, or put inside the renormalisation."""

    kind = "routed scaling"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On modules that hold the factor."""
        for path in _holders(case, "routed_scaling_factor"):
            own = float(_held(case, path, "routed_scaling_factor"))
            for value, words in ((1.0, "dropped"), (own * own, "applied twice"), (1 / own, "inverted")):
                if value != own:

                    def edit(at: Case, surgery: Surgery, path: str = path, value: float = value) -> None:
                        surgery.attribute(at.model.get_submodule(path), "routed_scaling_factor", value)

                    yield Candidate(f"routed_scaling_factor {own:g} of {path} is {words}", edit, "apply it once")


class CorrectionBias(Hypothesis):
    """The bias that corrects the choice of experts is dropped, or weighs the experts too."""

    kind = "correction bias"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On routers that hold one."""
        for name in ("e_score_correction_bias", "expert_bias", "moe_statics"):
            for path in _holders(case, name):
                if not isinstance(getattr(case.model.get_submodule(path), name), Tensor):
                    continue

                def edit(at: Case, surgery: Surgery, path: str = path, name: str = name) -> None:
                    owner = at.model.get_submodule(path)
                    surgery.parameter(owner, name, torch.zeros_like(getattr(owner, name)))

                yield Candidate(f"{name} of {path} is dropped", edit, "load it and add it to the scores for the choice")


class SharedExpert(Hypothesis):
    """The shared expert is left out, added twice, or not gated."""

    kind = "shared expert"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On modules that have one."""
        for name in ("shared_expert", "shared_experts", "shared_mlp"):
            for path in _holders(case, name):
                if not isinstance(getattr(case.model.get_submodule(path), name), nn.Module):
                    continue
                scaling = case.number("routed_scaling_factor") or 1.0
                for factor, words in (
                    (0.0, "left out"),
                    (2.0, "added twice"),
                    (1 / scaling, "divided"),
                    (scaling, "scaled"),
                ):
                    if factor == 1.0:
                        continue

                    def edit(
                        at: Case, surgery: Surgery, path: str = path, name: str = name, factor: float = factor
                    ) -> None:
                        owner = at.model.get_submodule(path).get_submodule(name)
                        surgery.output(owner, lambda _, out: out * factor)

                    yield Candidate(f"{path}.{name} is {words}", edit, "add it once, as the source does")
        for path in _holders(case, "shared_expert_gate"):

            def ungated(at: Case, surgery: Surgery, path: str = path) -> None:
                gate = at.model.get_submodule(path).get_submodule("shared_expert_gate")
                surgery.output(gate, lambda _, out: torch.full_like(out, 40.0))

            yield Candidate(f"the shared expert of {path} is not gated", ungated, "multiply by the gate's sigmoid")


class ExpertBias(Hypothesis):
    """The experts' biases are dropped."""

    kind = "bias dropped"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each of them, and all."""
        for path, module in case.sites(Part.EXPERTS):
            names = [name for name in module._parameters if "bias" in name]
            for group in [[name] for name in names] + ([names] if len(names) > 1 else []):

                def edit(at: Case, surgery: Surgery, path: str = path, group: list[str] = group) -> None:
                    owner = at.model.get_submodule(path)
                    for name in group:
                        surgery.parameter(owner, name, torch.zeros_like(getattr(owner, name)))

                yield Candidate(f"{', '.join(group)} of {path} dropped", edit, "load and add the biases")
