"""Which formula a source module computes, measured by running it: norms, rotations, activations."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.drafts import NormFormula, RotationStyle, SetActivation

_SEED = 7


def norm_formula(path: str, norm: nn.Module, eps: float) -> NormFormula | None:
    """The formula that gives the norm's output in fp32, and bit for bit in bf16; None where none does.

    The module is copied, in both dtypes, and given a drawn weight [size]; a norm with a bias has no formula here.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or isinstance(getattr(norm, "bias", None), Tensor):
        return None
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(weight.shape, generator=generator) * 0.3 + 0.7
    x = torch.randn(32, weight.shape[0], generator=generator) * 2 + 0.5
    wide, low = (_copied(norm, drawn, dtype) for dtype in (torch.float32, torch.bfloat16))
    try:
        exact, rounded = wide(x), low(x.bfloat16())
    except (RuntimeError, TypeError, ValueError):
        return None
    for centred in (False, True):
        for offset in (0.0, 1.0):
            if not torch.allclose(exact, _normed(x, drawn, eps, centred, offset, False), rtol=1e-5, atol=1e-6):
                continue
            for late in (False, True):
                given = _normed(x.bfloat16(), drawn.bfloat16(), eps, centred, offset, late)
                if torch.equal(rounded, given):
                    return NormFormula(of=(path,), eps=eps, centred=centred, offset=offset, late=late)
    return None


def _copied(norm: nn.Module, weight: Tensor, dtype: torch.dtype) -> Any:
    made = copy.deepcopy(norm).to(dtype)
    vars(made).pop("forward", None)
    made._forward_hooks.clear()
    made._forward_pre_hooks.clear()
    made.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return made


def _normed(x: Tensor, weight: Tensor, eps: float, centred: bool, offset: float, late: bool) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if late:
        return (wide * (offset + weight.float())).to(x.dtype)
    return (offset + weight) * wide.to(x.dtype) if offset else weight * wide.to(x.dtype)


def rotation_style(path: str, attention: nn.Module, forms: dict[str, Callable[..., Any]]) -> RotationStyle | None:
    """Halves or pairs, whichever form gives what the module's own `apply_rotary_pos_emb` gives; else None.

    `forms`: style -> function of (q, k [1, 2, 5, 8], cos, sin [1, 5, 8]) that gives both rotated.
    """
    own = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    q, k = torch.randn(1, 2, 5, 8, generator=generator), torch.randn(1, 2, 5, 8, generator=generator)
    angles = torch.rand(1, 5, 4, generator=generator)
    angles = torch.cat((angles, angles), dim=-1)
    try:
        expected = own(q, k, angles.cos(), angles.sin())
    except (RuntimeError, TypeError, ValueError):
        return None
    for style, form in forms.items():
        given = form(q, k, angles.cos(), angles.sin())
        if all(torch.allclose(one, two, atol=1e-5) for one, two in zip(expected, given, strict=True)):
            return RotationStyle(of=(path,), style=style)  # type: ignore[arg-type]
    return None


def activation(path: str, own: Callable[[Tensor], Tensor], known: dict[str, Any]) -> SetActivation | None:
    """The named formula that the source's activation computes; None where no name fits, or it does nothing."""
    probe = torch.linspace(-3, 3, 13)
    for name, function in known.items():
        if name != "none" and torch.allclose(own(probe), function(probe), atol=1e-6):
            return SetActivation(of=(path,), name=name)  # type: ignore[arg-type]
    return None
