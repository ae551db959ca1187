"""Norms: found and described by what their forward computes, not by their name."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equiport.port.fingerprint import NormFacets, NormKind
from equiport.port.fingerprint_probe import same

_WIDE = 64
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_epsilon", "rms_norm_eps")


def is_norm(module: nn.Module, width: int) -> bool:
    """Whether a leaf module normalises its last dimension: its result does not follow the scale of its input."""
    if isinstance(module, (nn.Linear, nn.Embedding, nn.Dropout)) or list(module.children()):
        return False
    parameters = list(module.parameters(recurse=False))
    if any(parameter.dim() > 2 for parameter in parameters) or len(parameters) > 2:
        return False
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1)) + 0.5
    shape = next((parameter.shape for parameter in parameters), torch.Size([width]))
    if len(shape) == 2:
        x = x[..., None, :].expand(2, 3, shape[0], width).contiguous()
    one, eight = _call(module, 4.0 * x), _call(module, 32.0 * x)
    if one is None or eight is None or one.shape != x.shape:
        return False
    return same(eight, one, 1e-3) and not same(one, 4.0 * x, 1e-3) and bool(one.abs().max() > 0)


def describe_norm(path: str, module: nn.Module, width: int) -> NormFacets:
    """Facets of a norm module with perturbed weights, by comparing it with each formula.

    A formula that reproduces it exactly in fp32 is its kind; else kind is "unknown".
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    weight = weight if isinstance(weight, Tensor) else None
    bias = bias if isinstance(bias, Tensor) else None
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 5, width, generator=generator) + 0.3
    if weight is not None and weight.dim() == 2:
        x = x[:, :, None, :].expand(4, 5, weight.shape[0], width).contiguous()
    eps = _eps_of(module)
    # small inputs, where eps decides
    small = x * (eps or 1e-6) ** 0.5
    kind, offset = _kind(module, x, small, weight, bias, eps)
    if kind == "unknown":
        for other in (0.0, 1e-5, 1e-6, 1e-8, 1e-12):
            kind, offset = _kind(module, x, small, weight, bias, other)
            if kind != "unknown":
                eps = other
                break
    in_fp32, multiplied = _precision(module, x, kind, offset, weight, bias, eps)
    return NormFacets(
        path=path,
        cls=type(module).__name__,
        kind=kind,
        eps=eps,
        width=width if weight is None else int(weight.shape[-1]),
        has_weight=weight is not None,
        has_bias=bias is not None,
        weight_offset=offset,
        multiply_in_fp32=multiplied,
        normalise_in_fp32=in_fp32,
    )


def _kind(
    module: nn.Module, x: Tensor, small: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float | None
) -> tuple[NormKind, float]:
    outputs = [_call(module, value) for value in (x, small)]
    kinds: tuple[NormKind, ...] = ("rmsnorm", "layernorm")
    for kind, offset in itertools.product(kinds, (0.0, 1.0) if weight is not None else (0.0,)):
        wanted = [_affine(_normalised(kind, value, eps or 0.0), weight, bias, offset) for value in (x, small)]
        if all(output is not None and same(output, value, 1e-4) for output, value in zip(outputs, wanted, strict=True)):
            return kind, offset
    return "unknown", 0.0


def _precision(
    module: nn.Module, x: Tensor, kind: NormKind, offset: float, weight: Tensor | None, bias: Tensor | None,
    eps: float | None,
) -> tuple[bool, bool | None]:  # fmt: skip
    """Which order of casts comes nearest in bf16: (statistics in fp32, weight multiplied in fp32)."""
    if kind == "unknown":
        return True, None
    import copy

    half = copy.deepcopy(module).to(torch.bfloat16)
    value = x.to(torch.bfloat16)
    output = _call(half, value)
    if output is None or output.dtype is not torch.bfloat16:
        return True, None
    w16 = None if weight is None else weight.detach().to(torch.bfloat16)
    b16 = None if bias is None else bias.detach().to(torch.bfloat16)
    w32, b32 = (None if w is None else w.float() for w in (w16, b16))
    n32 = _normalised(kind, value.float(), eps or 0.0)
    formulas: dict[tuple[bool, bool | None], Callable[[], Tensor]] = {
        (True, True): lambda: _affine(n32, w32, b32, offset).to(torch.bfloat16),
        (True, False): lambda: _affine(n32.to(torch.bfloat16), w16, b16, offset),
        (False, False): lambda: _affine(_normalised(kind, value, eps or 0.0), w16, b16, offset),
    }
    wrong = {order: int((formula() != output).sum()) for order, formula in formulas.items()}
    order = min(wrong, key=lambda key: wrong[key])
    if weight is None:
        return order[0], None
    return order


def _normalised(kind: NormKind, x: Tensor, eps: float) -> Tensor:
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    if weight is not None:
        x = (offset + weight) * x if offset else weight * x
    return x if bias is None else x + bias


def _eps_of(module: nn.Module) -> float | None:
    for name in _EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    floats = [value for name, value in vars(module).items() if isinstance(value, float) and "eps" in name]
    return floats[0] if floats else None


def _call(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            output = module(x)
    except Exception:
        return None
    return output if isinstance(output, Tensor) else None
