"""Precision order: right in fp32, rounded too early or summed in parts in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from equiport.compare.baseline import split_reduction
from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.causes.norm import eps_name, formula_of
from equiport.localize.causes.scores import low_scores
from equiport.localize.hypothesis import Candidate
from equiport.localize.surgery import CoreCall, Surgery, has_core

KIND = "precision order"


def candidates(case: Case) -> Iterable[Candidate]:
    """Defects that leave fp32 as it is: to be put into the bf16 source model."""
    for path, module in case.sites(Part.NORM):
        if isinstance(getattr(module, "weight", None), Tensor):
            draft = formula_of(path, module)
            for what, form, remedy in _NORMS:
                yield Candidate(what.format(path), _norm(path, form), remedy, draft)
    for path, module in case.sites(Part.ROTARY):
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            yield Candidate(
                f"the frequencies of {path or 'the rotary tables'} are rounded to bf16", _low_frequencies(path),
                "compute inv_freq in fp32 when it is used: a registered buffer is cast with the model",
            )  # fmt: skip
    for path, module in case.sites(Part.ATTENTION):
        if has_core(module):
            yield Candidate(f"the softmax of {path} is taken in bf16", _low_softmax(path), "take the softmax in fp32")
    yield from low_scores(case)
    experts = case.number("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    for path, module in case.sites(*Part):
        if experts and hasattr(module, "experts") and (hasattr(module, "gate") or hasattr(module, "router")):
            yield Candidate(
                f"the scores of the experts of {path} are rounded to bf16 before the choice",
                _low_choice(path, int(experts)), "choose and weigh the experts by scores in fp32",
            )  # fmt: skip
    for path, _ in case.sites(Part.LINEAR):
        for parts in (2, 4, 8):
            yield Candidate(
                f"the reduction of {path} is split in {parts}", _split(path, parts),
                f"declare reduction_split {parts} in component_mapping.json if the port shards it",
            )  # fmt: skip


def _norm(path: str, form: Callable[[Tensor, Tensor, float, nn.Module], Tensor]):  # type: ignore[no-untyped-def]
    """The norm as `form` computes it of its input, its own output, eps and itself."""

    def edit(at: Case, surgery: Surgery) -> None:
        norm = at.model.get_submodule(path)
        name = eps_name(norm)
        eps = float(getattr(norm, name)) if name else 1e-6
        surgery.output(norm, lambda x, out: form(x, out, eps, norm).to(out.dtype))

    return edit


def _scaled(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _low(x: Tensor, out: Tensor, eps: float, norm: nn.Module) -> Tensor:
    return _scaled(x, eps) * _weight(norm, out.dtype)


def _low_wide_weight(x: Tensor, out: Tensor, eps: float, norm: nn.Module) -> Tensor:
    return _scaled(x, eps) * _weight(norm, torch.float32)


def _late_cast(x: Tensor, out: Tensor, eps: float, norm: nn.Module) -> Tensor:
    return _scaled(x.float(), eps) * _weight(norm, torch.float32)


def _early_cast(x: Tensor, out: Tensor, eps: float, norm: nn.Module) -> Tensor:
    return _scaled(x.float(), eps).to(out.dtype) * _weight(norm, out.dtype)


def _weight(norm: nn.Module, dtype: torch.dtype) -> Tensor:
    assert isinstance(norm.weight, Tensor)
    value = norm.weight.to(dtype)  # Gemma's 1 is added in this precision
    return value + 1 if "gemma" in type(norm).__name__.lower() else value


def _low_frequencies(path: str):  # type: ignore[no-untyped-def]
    def edit(at: Case, surgery: Surgery) -> None:
        rotary = at.model.get_submodule(path)
        frequencies = rotary.inv_freq
        assert isinstance(frequencies, Tensor)
        surgery.parameter(rotary, "inv_freq", frequencies.bfloat16().to(frequencies.dtype))

    return edit


def _low_softmax(path: str):  # type: ignore[no-untyped-def]
    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)

        def low(scores: Tensor, dim: int = -1, **_: object) -> Tensor:
            # torch's own softmax of bf16 scores works in fp32 inside
            weights = (scores - scores.amax(dim=dim, keepdim=True)).exp()
            return weights / weights.sum(dim=dim, keepdim=True)

        def core(call: CoreCall) -> CoreCall:
            surgery.attribute(torch.nn.functional, "softmax", low)
            return call

        surgery.core(attention, core)

    return edit


_NORMS = (
    ("the variance of {} is taken in bf16", _low, "compute the norm in fp32"),
    ("the variance of {} is taken in bf16, its weight is not", _low_wide_weight, "compute the norm in fp32"),
    ("the weight of {} is multiplied in fp32, before the cast", _late_cast, "cast before the weight, as the source"),
    (
        "the weight of {} is multiplied in bf16, after the cast", _early_cast,
        "multiply by the weight in fp32, then cast, as the source does",
    ),
)  # fmt: skip
_SCORES = ((torch.Tensor, "sigmoid"), (torch.Tensor, "softmax"), (torch, "sigmoid"), (torch, "softmax"))


def _low_choice(path: str, experts: int):  # type: ignore[no-untyped-def]
    """While the mixture runs, what sigmoid and softmax give for a row of experts is cast to bf16."""

    def edit(at: Case, surgery: Surgery) -> None:
        mixture, inside = at.model.get_submodule(path), [False]
        original = mixture.forward

        def run(*args: object, **kwargs: object) -> object:
            inside[0] = True
            try:
                return original(*args, **kwargs)
            finally:
                inside[0] = False

        surgery.forward(mixture, run)
        for owner, name in (*_SCORES, (torch.nn.functional, "softmax")):
            kept = getattr(owner, name)

            def low(scores: Tensor, *args: object, kept: Any = kept, **kwargs: object) -> Any:
                out = kept(scores, *args, **kwargs)
                return out.bfloat16() if inside[0] and scores.shape[-1] == experts else out

            surgery.attribute(owner, name, low)

    return edit


def _split(path: str, parts: int):  # type: ignore[no-untyped-def]
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.entered(split_reduction(at.model, parts, [path]))

    return edit
