"""MLPs: gate and up swapped, another activation, clamp, the oai form's constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.drafts import Order, ReorderWeight, SwapWeights
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.source_forms import activation
from equiport.localize.surgery import Surgery

_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu (erf)": F.gelu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).pow(2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "none": lambda x: x,
}
_ACT_NAMES = ("act_fn", "act", "activation_fn", "activation")
_MLPS = (Part.MLP, Part.EXPERTS, Part.MOE)


class GateUp(Hypothesis):
    """The activation sits on the other half."""

    kind = "gate/up order"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Two projections swapped, or the halves of a fused one; interleaved where the source has halves."""
        for path, module in case.sites(*_MLPS):
            names = dict(module.named_children())
            if "gate_proj" in names and "up_proj" in names:

                def swap(at: Case, surgery: Surgery, path: str = path) -> None:
                    mlp = at.model.get_submodule(path)
                    gate, up = mlp.get_submodule("gate_proj"), mlp.get_submodule("up_proj")
                    for name in ("weight", "bias"):
                        mine, other = getattr(gate, name, None), getattr(up, name, None)
                        if isinstance(mine, Tensor) and isinstance(other, Tensor):
                            surgery.parameter(gate, name, other.detach().clone())
                            surgery.parameter(up, name, mine.detach().clone())

                yield Candidate(
                    f"gate and up of {path} are swapped", swap, "swap them back",
                    SwapWeights(of=(f"{path}.gate_proj", f"{path}.up_proj")),
                )  # fmt: skip
            for name in ("gate_up_proj", "gate_up_proj_bias"):
                if isinstance(getattr(module, name, None), (nn.Linear, Tensor)) and name == "gate_up_proj":
                    yield from _fused(path, isinstance(getattr(module, name), nn.Linear))


_INVERSES: dict[str, Order] = {
    "swapped": "halves swapped",
    "taken as halves, where they are interleaved": "part the interleaved",
    "taken as interleaved, where they are halves": "interleave halves",
    "swapped, interleaved": "swap neighbours",
}


def _fused(path: str, linear: bool) -> Iterable[Candidate]:
    def order(size: int, form: str) -> list[int]:
        half, plain = size // 2, list(range(size))
        return {
            "swapped": plain[half:] + plain[:half],
            "taken as halves, where they are interleaved": [i // 2 + (i % 2) * half for i in plain],
            "taken as interleaved, where they are halves": plain[0::2] + plain[1::2],
            "swapped, interleaved": [i ^ 1 for i in plain],
        }[form]

    for form, inverse in _INVERSES.items():

        def edit(at: Case, surgery: Surgery, form: str = form) -> None:
            owner = at.model.get_submodule(path)
            fused = owner.gate_up_proj
            if isinstance(fused, nn.Linear):
                rows = order(fused.out_features, form)
                surgery.parameter(fused, "weight", fused.weight[rows].clone())
                if fused.bias is not None:
                    surgery.parameter(fused, "bias", fused.bias[rows].clone())
                return
            assert isinstance(fused, Tensor)
            bias = getattr(owner, "gate_up_proj_bias", None)
            axis = 1 if bias is None and fused.shape[1] % 2 == 0 and fused.shape[1] > fused.shape[2] else 2
            columns = order(fused.shape[axis], form)
            surgery.parameter(owner, "gate_up_proj", fused.index_select(axis, torch.tensor(columns)))
            if isinstance(bias, Tensor):
                surgery.parameter(owner, "gate_up_proj_bias", bias[:, columns].clone())

        yield Candidate(
            f"gate and up of {path}.gate_up_proj are {form}", edit, "use the source's layout",
            ReorderWeight(of=(f"{path}.gate_up_proj",), axis=0, order=inverse) if linear else None,
        )  # fmt: skip


class Activation(Hypothesis):
    """Another activation, or another flavour of the same."""

    kind = "activation flavour"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Every activation that is not the source's."""
        probe = torch.linspace(-3, 3, 13)
        for path, module in case.sites(*_MLPS):
            name = next((one for one in _ACT_NAMES if callable(getattr(module, one, None))), "")
            if not name:
                continue
            own = getattr(module, name)(probe)
            draft = activation(path, getattr(module, name), _ACTIVATIONS)
            for words, function in _ACTIVATIONS.items():
                if torch.allclose(own, function(probe), atol=1e-6):
                    continue

                def edit(
                    at: Case, surgery: Surgery, path: str = path, name: str = name, function: Any = function
                ) -> None:
                    owner = at.model.get_submodule(path)
                    held = getattr(owner, name)
                    if isinstance(held, nn.Module):
                        surgery.forward(held, function)
                    else:
                        surgery.attribute(owner, name, function)

                yield Candidate(
                    f"the activation of {path} is {words}", edit,
                    f"use {case.config.hidden_act if hasattr(case.config, 'hidden_act') else 'the configured one'}",
                    draft,
                )  # fmt: skip


class Clamp(Hypothesis):
    """The clamp of a gated activation is missing or another one; the oai form lacks its 1 or its alpha."""

    kind = "clamp"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Limit dropped, halved, doubled; on modules that have one."""
        for path, module in case.sites(*_MLPS):
            limit = getattr(module, "limit", None)
            if isinstance(limit, (int, float)):
                for value, words in ((1e30, "missing"), (limit * 2, f"at {limit * 2:g}"), (7.0, "at 7")):
                    if value != limit:
                        yield _set(path, "limit", value, f"the clamp of {path} is {words}, the source's at {limit:g}")


class OaiForm(Hypothesis):
    """(up + 1) · gate · sigmoid(alpha · gate) without its 1, or with another alpha."""

    kind = "activation flavour"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On modules with an alpha."""
        for path, module in case.sites(*_MLPS):
            alpha = getattr(module, "alpha", None)
            if not isinstance(alpha, (int, float)) or not hasattr(module, "_apply_gate"):
                continue
            if alpha != 1.0:
                yield _set(path, "alpha", 1.0, f"the gate of {path} is a plain silu, without alpha")

            def edit(at: Case, surgery: Surgery, path: str = path) -> None:
                owner: Any = at.model.get_submodule(path)

                def gated(gate_up: Tensor) -> Tensor:
                    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
                    gate, up = gate.clamp(max=owner.limit), up.clamp(-owner.limit, owner.limit)
                    return up * gate * torch.sigmoid(gate * owner.alpha)

                surgery.attribute(owner, "_apply_gate", gated)

            yield Candidate(f"{path} multiplies by up, not by up + 1", edit, "multiply by up + 1")


def _set(path: str, name: str, value: float, says: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.attribute(at.model.get_submodule(path), name, value)

    return Candidate(says, edit, "use the configured value")
