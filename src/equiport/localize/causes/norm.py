"""Norms: eps, offset, kind, weight ignored, where it is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.drafts import NormFormula, SetEps, ShiftWeight
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.source_forms import norm_formula
from equiport.localize.surgery import Surgery

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_EPS_VALUES = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def eps_name(module: nn.Module) -> str:
    """The attribute that holds a norm's eps; empty if it has none."""
    return next((name for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), "")


class Eps(Hypothesis):
    """Another eps under the root."""

    kind = "eps"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The usual values, and tenfold up and down."""
        for path, module in case.sites(Part.NORM):
            name = eps_name(module)
            if not name:
                continue
            own = float(getattr(module, name))
            for value in dict.fromkeys((*_EPS_VALUES, own / 10, own * 10, own * 100, own / 100)):
                if abs(value - own) > 1e-3 * own:
                    yield _attribute(path, name, value, f"eps of {path} is {value:g}, the source's {own:g}", own)


def _attribute(path: str, name: str, value: float, says: str, own: float) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.attribute(at.model.get_submodule(path), name, value)

    return Candidate(says, edit, f"use {own:g}", SetEps(of=(path,), value=own))


class Offset(Hypothesis):
    """The weight is used as w where the source uses 1 + w, or the other way round."""

    kind = "norm offset"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Plus and minus one, once and twice."""
        for path, module in case.sites(Part.NORM):
            if not isinstance(getattr(module, "weight", None), Tensor):
                continue
            for by in (-1.0, 1.0):

                def edit(at: Case, surgery: Surgery, path: str = path, by: float = by) -> None:
                    norm: Any = at.model.get_submodule(path)
                    surgery.parameter(norm, "weight", norm.weight + by)

                yield Candidate(
                    f"the weight of {path} is taken as {'w + 1' if by > 0 else 'w - 1'} of the source's",
                    edit,
                    "1 + w where the source has it, once",
                    ShiftWeight(of=(path,), by=-by),
                )


class Kind(Hypothesis):
    """Another norm: mean taken off or not, weight or bias ignored, root mean square left out."""

    kind = "norm kind"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One candidate a form and norm."""
        for path, module in case.sites(Part.NORM):
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            draft = formula_of(path, module)
            for words, form in _forms().items():

                def edit(at: Case, surgery: Surgery, path: str = path, form: _Form = form) -> None:
                    norm = at.model.get_submodule(path)
                    name = eps_name(norm)
                    eps = float(getattr(norm, name)) if name else 1e-6
                    surgery.output(norm, lambda x, out: form(x, norm, eps).to(out.dtype))

                if isinstance(weight, Tensor) and not (words.startswith("LayerNorm") and bias is not None):
                    yield Candidate(f"{path} is {words}", edit, f"use the source's {type(module).__name__}", draft)
            if isinstance(weight, Tensor):

                def deaf(at: Case, surgery: Surgery, path: str = path) -> None:
                    norm: Any = at.model.get_submodule(path)
                    offset = "gemma" in type(norm).__name__.lower()
                    surgery.parameter(norm, "weight", torch.full_like(norm.weight, 0.0 if offset else 1.0))

                yield Candidate(f"the weight of {path} is ignored", deaf, "apply the weight", draft)
            if part_is_rms(module):
                yield _mean_taken_off(path, draft)


_Form = Callable[[Tensor, nn.Module, float], Tensor]


def part_is_rms(module: nn.Module) -> bool:
    """A norm without mean, by name."""
    return "rms" in type(module).__name__.lower()


def _forms() -> dict[str, _Form]:
    def weight_of(norm: nn.Module) -> Tensor:
        value = norm.weight
        assert isinstance(value, Tensor)
        return value + 1 if "gemma" in type(norm).__name__.lower() else value

    def rms(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight_of(norm)

    def layer(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight_of(norm)

    def plain(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        return x

    def weighted(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        return x * weight_of(norm)

    def unit(x: Tensor, norm: nn.Module, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps) * weight_of(norm)

    return {
        "RMSNorm without bias": rms,
        "LayerNorm without bias": layer,
        "left out": plain,
        "a product with the weight alone": weighted,
        "scaled to length 1": unit,
    }


def formula_of(path: str, norm: nn.Module) -> NormFormula | None:
    """The source norm's own formula, for a patch that puts it in; None where it has no known one."""
    name = eps_name(norm)
    return norm_formula(path, norm, float(getattr(norm, name)) if name else 0.0)


def _mean_taken_off(path: str, draft: NormFormula | None) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.input(at.model.get_submodule(path), lambda x: x - x.mean(-1, keepdim=True))

    return Candidate(f"{path} takes the mean off", edit, "use an RMSNorm", draft)
