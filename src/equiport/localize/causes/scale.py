"""A factor on a component's output: a multiplier missing, applied twice, inverted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equiport.localize.anatomy import Part, part_of
from equiport.localize.case import Case, observed, predicted
from equiport.localize.drafts import Figure, ScaleBias, ScaleOutput
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_TOLERANCE = 2e-3
# config fields that multiply or divide somewhere in a decoder
_FIELDS = (
    "residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling", "logit_scale",
    "routed_scaling_factor", "query_pre_attn_scalar", "head_dim", "hidden_size", "num_attention_heads",
    "num_key_value_heads", "num_hidden_layers", "lm_head_multiplier", "scale_emb", "scale_depth",
)  # fmt: skip


@dataclass(frozen=True)
class NamedFactor:
    """A factor that can be made of the config, in words."""

    value: float
    words: str
    field: str = ""
    power: float = 1.0


def named_factors(case: Case) -> list[NamedFactor]:
    """Powers of the config's numbers that a forgotten or doubled multiplier leaves behind."""
    found = []
    for name in _FIELDS:
        value = case.number(name)
        if value is None or value <= 0 or value == 1:
            continue
        for power, words in ((1, name), (-1, f"1/{name}"), (0.5, f"sqrt({name})"), (-0.5, f"1/sqrt({name})")):
            found.append(NamedFactor(value**power, words, name, power))
    return found


def figure(case: Case, value: float) -> Figure:
    """The number, as a power of a config field where it is one: a number of a small fixture does not hold elsewhere."""
    for named in named_factors(case):
        if abs(named.value / value - 1) < 1e-5:
            return Figure(value=value, field=named.field, power=named.power)
    return Figure(value=value)


def in_words(case: Case, factor: float) -> str:
    """The factor, named after the config where it fits."""
    for named in named_factors(case):
        if abs(named.value / factor - 1) < _TOLERANCE:
            return f"x {factor:.6g} = {named.words}"
    return f"x {factor:.6g}"


class OutputScale(Hypothesis):
    """The whole output is a multiple of the source's."""

    kind = "scale or multiplier"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The least-squares factor, if it is not 1."""
        theirs, ours = observed(case.observations), predicted(reference, case.observations)
        if theirs.shape != ours.shape or not float(ours.pow(2).sum()):
            return
        factor = float((theirs * ours).sum() / ours.pow(2).sum())
        if not factor or abs(factor - 1) < 1e-6 or factor != factor:
            return
        for named in named_factors(case):
            if abs(named.value / factor - 1) < 1e-3:
                factor = named.value
                break

        norms = all(part_of(module) is Part.NORM for module in case.modules)

        def edit(at: Case, surgery: Surgery) -> None:
            for module in at.modules:
                if at.is_entry:
                    surgery.given(module, lambda hidden: hidden * factor)
                else:
                    surgery.output(module, lambda _, out: out * factor)

        yield Candidate(
            f"the output is {in_words(case, factor)} of the source's",
            edit,
            f"multiply the output by {1 / factor:.8g}",
            None
            if case.sources == ("",) or case.is_entry
            else ScaleOutput(of=case.sources, factor=figure(case, 1 / factor), wide=norms),
        )


class Bias(Hypothesis):
    """A bias is missing or added twice, in the suspect or in parts of it."""

    kind = "bias dropped"
    cost = 3

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each bias at or inside the suspect, and groups of them."""
        sites = [(path, module) for path, module in case.sites(Part.LINEAR, Part.NORM, Part.ROUTER)]
        biased = [(path, module) for path, module in sites if isinstance(getattr(module, "bias", None), Tensor)]
        if not biased:
            return
        groups = [[item] for item in biased] + ([biased] if len(biased) > 1 else [])
        groups += [biased[:count] for count in range(2, len(biased))]
        for group in groups:
            for times, word in ((0.0, "dropped"), (2.0, "added twice")):
                yield _bias(group, times, word)


def _bias(group: list[tuple[str, torch.nn.Module]], times: float, word: str) -> Candidate:
    names = [path for path, _ in group]

    def edit(at: Case, surgery: Surgery) -> None:
        for path in names:
            module: Any = at.model.get_submodule(path)
            surgery.parameter(module, "bias", module.bias * times)

    draft = ScaleBias(of=tuple(names), factor=1 / times) if times else None
    return Candidate(f"the bias of {', '.join(names)} is {word}", edit, "load and add the bias once", draft)


def is_linear(case: Case) -> bool:
    """Whether every source module of the case is a projection."""
    return all(part_of(module) is Part.LINEAR for module in case.modules)
