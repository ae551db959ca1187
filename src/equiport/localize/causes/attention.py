"""Attention: softmax scale, softcap, qk-norm, head order, sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.causes.scale import figure
from equiport.localize.drafts import RepeatHeads
from equiport.localize.drafts import SoftmaxScale as ScaleDraft
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import CoreCall, RotaryCall, Surgery, has_core, has_rotation

_QK_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))


def _cores(case: Case) -> Iterable[tuple[str, nn.Module]]:
    return ((path, module) for path, module in case.sites(Part.ATTENTION) if has_core(module))


def _option(path: str, name: str, value: float | None) -> Callable[[Case, Surgery], None]:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.core(at.model.get_submodule(path), lambda call: call.with_option(name, value))

    return edit


class SoftmaxScale(Hypothesis):
    """The scores are scaled otherwise."""

    kind = "softmax scale"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The usual conventions, inverted ones, and the config's numbers."""
        for path, module in _cores(case):
            own = float(getattr(module, "scaling", 0.0) or 0.0)
            if not own:
                continue
            head = case.number("head_dim") or float(getattr(module, "head_dim", 1))
            hidden = case.number("hidden_size") or 1.0
            numbers = {
                "head_dim**-0.5": head**-0.5, "1 (left out)": 1.0, "1/scale (inverted)": 1 / own,
                "applied twice": own**2, "its root": own**0.5, "hidden_size**-0.5": hidden**-0.5,
                "head_dim**-1": 1 / head, "head_dim**0.5": head**0.5,
            }  # fmt: skip
            for name in ("query_pre_attn_scalar", "attention_multiplier"):
                value = case.number(name)
                if value:
                    numbers |= {name: value, f"{name}**-0.5": value**-0.5, f"1/{name}": 1 / value}
            heads = case.number("num_attention_heads")
            if heads:
                numbers["(hidden_size/heads)**-0.5"] = (hidden / heads) ** -0.5
            for words, value in numbers.items():
                if abs(value / own - 1) > 1e-6:
                    yield Candidate(
                        f"scores of {path} are scaled by {words} = {value:.6g}, the source's {own:.6g}",
                        _option(path, "scaling", value),
                        f"scale the scores by {own:.8g}",
                        ScaleDraft(of=(path,), scale=figure(case, own)),
                    )


class Softcap(Hypothesis):
    """The cap on the scores is missing or another one."""

    kind = "softcap"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Dropped, or the final cap's value, where the source has one."""
        own = case.number("attn_logit_softcapping")
        if not own:
            return
        for path, _ in _cores(case):
            for value in (None, case.number("final_logit_softcapping"), 50.0, 30.0):
                if value != own:
                    yield Candidate(
                        f"the softcap of {path} is {value or 'missing'}, the source's {own:g}",
                        _option(path, "softcap", value),
                        f"cap the scores at {own:g}",
                    )


class QkNorm(Hypothesis):
    """q and k are not normed, or normed on the other side of the rotation."""

    kind = "qk-norm"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Left out; q or k alone; after instead of before the rotation and the reverse; a head or the full width."""
        for path, module in case.sites(Part.ATTENTION):
            pair = next((names for names in _QK_NORMS if all(hasattr(module, name) for name in names)), None)
            if pair is None:
                continue
            for names, words in ((pair, "q and k are"), (pair[:1], "q is"), (pair[1:], "k is")):
                yield Candidate(f"{words} not normed in {path}", _left_out(path, names), "norm q and k")
            if has_rotation(module) and has_core(module):
                yield Candidate(
                    f"q and k of {path} are normed on the other side of the rotation", _other_side(path, pair),
                    "norm them where the source does",
                )  # fmt: skip
            for parts in (2, 4, int(case.number("num_key_value_heads") or 1)):
                yield Candidate(
                    f"q and k of {path} are normed in {parts} parts (a shard each)", _in_parts(path, pair, parts),
                    "take the root mean square over the full width, across shards",
                )  # fmt: skip


def _left_out(path: str, names: tuple[str, ...]) -> Callable[[Case, Surgery], None]:
    def edit(at: Case, surgery: Surgery) -> None:
        for name in names:
            surgery.output(at.model.get_submodule(path).get_submodule(name), lambda x, out: x.to(out.dtype))

    return edit


def _other_side(path: str, names: tuple[str, ...]) -> Callable[[Case, Surgery], None]:
    """Where the source norms before rotating, norm after; and the reverse."""

    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)
        norms = [attention.get_submodule(name) for name in names]
        seen: list[str] = []
        originals = [norm.forward for norm in norms]
        for norm in norms:

            def held(x: Tensor, *_: object) -> Tensor:
                seen.append("norm")
                return x

            surgery.forward(norm, held)
        state = {"before": False}

        def rotation(call: RotaryCall, plain: Callable[[RotaryCall], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            state["before"] = bool(seen)
            if not state["before"]:
                call = replace(call, query=originals[0](call.query), key=originals[1](call.key))
            return plain(call)

        def core(call: CoreCall) -> CoreCall:
            if state["before"]:
                call = replace(call, query=originals[0](call.query), key=originals[1](call.key))
            return call

        surgery.rotation(attention, rotation)
        surgery.core(attention, core)

    return edit


def _in_parts(path: str, names: tuple[str, ...], parts: int) -> Callable[[Case, Surgery], None]:
    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)
        for name in names:
            norm = attention.get_submodule(name)
            eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))  # type: ignore[arg-type]

            def split(x: Tensor, out: Tensor, norm: nn.Module = norm, eps: float = eps) -> Tensor:
                if parts < 2 or x.shape[-1] % parts:
                    return out
                pieces = x.float().unflatten(-1, (parts, -1))
                scaled = pieces * torch.rsqrt(pieces.pow(2).mean(-1, keepdim=True) + eps)
                return (scaled.flatten(-2) * norm.weight).to(out.dtype)  # type: ignore[operator]

            surgery.output(norm, split)

    return edit


class NormedTwice(Hypothesis):
    """q and k are normed over all heads at once, without a weight, and then once more by their own norms."""

    kind = "qk-norm"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """With the eps of the source's own norms; what is left of it is an eps that differs from token to token."""
        for path, module in case.sites(Part.ATTENTION):
            projections = [getattr(module, name, None) for name in ("q_proj", "k_proj")]
            norms = [getattr(module, name, None) for pair in _QK_NORMS for name in pair]
            eps = case.number("rms_norm_eps", "norm_eps", "layer_norm_eps")
            if eps is None or not all(isinstance(one, nn.Linear) for one in projections) or not any(norms):
                continue

            def edit(at: Case, surgery: Surgery, path: str = path, eps: float = eps) -> None:
                def normed(_: Tensor, out: Tensor) -> Tensor:
                    wide = out.float()
                    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(out.dtype)

                for name in ("q_proj", "k_proj"):
                    surgery.output(at.model.get_submodule(f"{path}.{name}"), normed)

            yield Candidate(
                f"q and k of {path} are normed over all heads at once before their own norms", edit, "norm them once"
            )


class Heads(Hypothesis):
    """Key and value heads meet other query heads."""

    kind = "head order or replication"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Tiled instead of repeated; k or v alone; reversed; the first head for all."""
        for path, module in _cores(case):
            groups = int(getattr(module, "num_key_value_groups", 1) or 1)
            for which, words in ((("key", "value"), "k and v"), (("key",), "k"), (("value",), "v")):
                for form, how in _HEAD_FORMS.items():
                    if form == "tiled" and groups == 1:
                        continue
                    yield Candidate(
                        f"{words} heads of {path} {how}", _heads(path, which, form),
                        "repeat each kv head for its group of query heads, in order",
                        RepeatHeads(of=(path,)) if form == "tiled" and len(which) == 2 else None,
                    )  # fmt: skip


_HEAD_FORMS = {
    "tiled": "are tiled over the query heads, not repeated",
    "first": "are all the first one",
    "reversed": "stand in reverse order",
    "rolled": "are moved by one",
}


def _heads(path: str, which: tuple[str, ...], form: str) -> Callable[[Case, Surgery], None]:
    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)

        def core(call: CoreCall) -> CoreCall:
            heads, count = call.query.shape[1], call.key.shape[1]
            index = torch.arange(count).repeat_interleave(heads // count)
            chosen = {
                "tiled": torch.arange(count).repeat(heads // count),
                "first": torch.zeros_like(index),
                "reversed": index.flip(0),
                "rolled": (index + 1) % count,
            }[form]
            key = call.key[:, chosen if "key" in which else index]
            value = call.value[:, chosen if "value" in which else index]
            module = _Ungrouped(call.module)
            return replace(call, module=module, key=key, value=value)

        surgery.core(attention, core)

    return edit


class _Ungrouped(nn.Module):
    """The attention as its core sees it, with kv heads already spread over the query heads."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.__dict__["_attention"] = attention
        self.num_key_value_groups = 1

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self.__dict__["_attention"], name)


class Sinks(Hypothesis):
    """The learned sinks are left out."""

    kind = "attention sinks"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On modules with sinks."""
        for path, module in case.sites(Part.ATTENTION):
            if isinstance(getattr(module, "sinks", None), Tensor):

                def edit(at: Case, surgery: Surgery, path: str = path) -> None:
                    owner: Any = at.model.get_submodule(path)
                    surgery.parameter(owner, "sinks", torch.full_like(owner.sinks, -1e4))

                yield Candidate(f"the sinks of {path} are left out", edit, "add the sinks to the softmax")
