"""Rotary embeddings: base, scaling, partial width, pairing, direction, positions, layers without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part, rotary_modules
from equiport.localize.case import Case
from equiport.localize.drafts import RotaryBase, RotationStyle
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.source_forms import rotation_style
from equiport.localize.surgery import RotaryCall, Surgery, has_core, has_rotation

Plain = Callable[[RotaryCall], tuple[Tensor, Tensor]]
_THETAS = (10000.0, 100000.0, 500000.0, 1000000.0, 50000.0, 5000000.0)


def frequency_names(rotary: nn.Module) -> list[str]:
    """The buffers with inverse frequencies; one a layer kind in some models."""
    return [name for name, _ in rotary.named_buffers() if name.endswith("inv_freq") and "original" not in name]


class Frequencies(Hypothesis):
    """Another base, or another scaling of the frequencies."""

    kind = "rope scaling or base"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The unscaled frequencies, the usual bases, factors of the config, the fitted base."""
        if not any(True for _ in case.sites(Part.ATTENTION, Part.ROTARY)):
            return
        draft = _base_draft(case)
        for words, edited in self._forms(case, reference):
            yield Candidate(
                f"the rotary frequencies are {words}", _frequencies(edited), "compute them as the source does",
                draft,
            )  # fmt: skip

    def _forms(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[tuple[str, _Edited]]:
        base = _base(case)
        for theta in dict.fromkeys((*_THETAS, base)):
            yield f"those of base {theta:g}, unscaled", partial(_of_base, theta=theta)
        for factor in _factors(case):
            yield f"divided by {factor:g}", partial(_times, factor=1 / factor)
            yield f"multiplied by {factor:g}", partial(_times, factor=factor)
            yield f"those of base {base:g}, divided by {factor:g}", partial(_of_base, theta=base, divisor=factor)
        fitted = _fitted_base(case)
        if fitted is not None:
            yield f"those of base {fitted:.7g}, unscaled", partial(_of_base, theta=fitted)
        for ratio in (1.001, 0.999, 1.01, 0.99, 1.1, 0.9, 2.0, 0.5):
            yield f"those of a base x {ratio:g}", partial(_base_times, ratio=ratio)
        for width in {int(case.number("head_dim") or 0), int(case.number("hidden_size") or 0)} - {0}:
            yield f"those of a width of {width}", partial(_of_base, theta=base, width=width)


_Edited = Callable[[Tensor], Tensor]


def _base_draft(case: Case) -> RotaryBase | None:
    """The source's own frequencies, where they are those of its base, divided by one number."""
    rotaries = rotary_modules(case.model)
    own = [getattr(rotary, name) for rotary in rotaries for name in frequency_names(rotary)]
    head = case.number("head_dim") or (case.number("hidden_size") or 0) / (case.number("num_attention_heads") or 1)
    if not own or not head or any(getattr(one, "attention_scaling", 1.0) != 1.0 for one in rotaries):
        return None
    base, divisor = _base(case), 1.0 / float(own[0][0])
    if not all(torch.allclose(one, _default(len(one), base) / divisor, rtol=1e-5) for one in own):
        return None
    paths = tuple(path for path, module in case.model.named_modules() if any(module is one for one in rotaries))
    return RotaryBase(of=paths, base=base, divisor=divisor, share=2 * len(own[0]) / head)


def _times(frequencies: Tensor, factor: float) -> Tensor:
    return frequencies * factor


def _base_times(frequencies: Tensor, ratio: float) -> Tensor:
    count = len(frequencies)
    return frequencies * ratio ** (-torch.arange(count, dtype=frequencies.dtype) / count)


def _of_base(frequencies: Tensor, theta: float, divisor: float = 1.0, width: int | None = None) -> Tensor:
    return _default(len(frequencies), theta, width) / divisor


def _frequencies(edited: Callable[[Tensor], Tensor]) -> Callable[[Case, Surgery], None]:
    def edit(at: Case, surgery: Surgery) -> None:
        for rotary in rotary_modules(at.model):
            for name in frequency_names(rotary):
                surgery.parameter(rotary, name, edited(getattr(rotary, name)))

    return edit


def _default(count: int, theta: float, width: int | None = None) -> Tensor:
    """`count` frequencies of base `theta`; of a head `width` wide, default twice their number."""
    return 1.0 / theta ** (torch.arange(0, 2 * count, 2).float() / (width or 2 * count))


def _rope_fields(case: Case) -> list[dict[str, object]]:
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(case.config, name, None)
        if isinstance(value, dict):
            found += [value, *(inner for inner in value.values() if isinstance(inner, dict))]
    return found


def _base(case: Case) -> float:
    for fields in _rope_fields(case):
        theta = fields.get("rope_theta")
        if isinstance(theta, (int, float)):
            return float(theta)
    return case.number("rope_theta", "rotary_emb_base") or 10000.0


def _factors(case: Case) -> list[float]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "mscale", "beta_fast")
    values = [fields.get(name) for fields in _rope_fields(case) for name in names]
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and value not in (0, 1)]
    return list(dict.fromkeys((*numbers, 2.0, 4.0, 8.0)))


def _fitted_base(case: Case) -> float | None:
    """The base that the target's tables were made of, if its tables are what is observed."""
    item = case.observations[0]
    if item.places is not None or item.target.dim() != 2 or len(item.target) < 2:
        return None
    cos, sin = item.target.double().chunk(2, dim=-1)
    half = cos.shape[-1] // 2
    angles = torch.atan2(sin[1], cos[1])[: max(half, 1)]
    if half < 2 or bool((angles <= 0).any()):
        return None
    slope = -torch.log(angles[-1] / angles[0]) / (half - 1) * half
    return float(math.exp(float(slope)))


class Amplitude(Hypothesis):
    """The factor on cos and sin (yarn, longrope) missing, squared, or on the wrong side."""

    kind = "rope scaling or base"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Dropped, squared, root; on models that have one."""
        for rotary in rotary_modules(case.model):
            held = getattr(rotary, "attention_scaling", None)
            if not isinstance(held, float) or held == 1.0:
                continue
            for value, words in (
                (1.0, "dropped"),
                (held**2, "squared"),
                (held**0.5, "its root"),
                (1 / held, "inverted"),
            ):

                def edit(at: Case, surgery: Surgery, value: float = value) -> None:
                    for one in rotary_modules(at.model):
                        surgery.attribute(one, "attention_scaling", value)

                yield Candidate(f"the factor {held:.6g} on cos and sin is {words}", edit, "apply it once")


class Pairing(Hypothesis):
    """Channels are paired otherwise, turned the other way, or only some of q and k are turned."""

    kind = "rotation style"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One candidate a form and attention."""
        for path, module in case.sites(Part.ATTENTION):
            if has_rotation(module):
                for words, form in _PAIRINGS.items():
                    yield _rotated(path, f"the rotation of {path} {words}", form, "rotate as the source does", module)


class Partial(Hypothesis):
    """Another share of each head is rotated."""

    kind = "partial rotary"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The whole head, where the source turns a part; a part, where it turns the whole."""
        for path, module in case.sites(Part.ATTENTION):
            if not has_core(module):
                continue
            own = _own_share(case, module)
            for share in (1.0, 0.75, 0.5, 0.25):
                # the source's own share in another pairing or of another base is no partial rotary
                if abs(share - own) > 1e-6:
                    for halves in (True, False):
                        yield _whole_head(path, share, halves)
            if own < 1 and has_rotation(module):
                yield _last_channels(path, own)


class Layers(Hypothesis):
    """Rotation on layers without positions, or none on layers with them."""

    kind = "NoPE layers"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Dropped; or added where the module does not rotate."""
        for path, module in case.sites(Part.ATTENTION):
            if has_rotation(module):
                yield _rotated(
                    path,
                    f"{path} does not rotate",
                    lambda call, _: (call.query, call.key),
                    "rotate q and k in this layer",
                    module,
                )
            if has_core(module):
                yield _added(path)


_Rotation = Callable[[RotaryCall, Plain], tuple[Tensor, Tensor]]


def _style(path: str, attention: nn.Module) -> RotationStyle | None:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
        return _turn(RotaryCall(q, k, cos, sin), halves)

    return rotation_style(
        path, attention, {"halves": partial(turned, halves=True), "pairs": partial(turned, halves=False)}
    )


def _rotated(path: str, says: str, form: _Rotation, repair: str, attention: nn.Module) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.rotation(at.model.get_submodule(path), form)

    return Candidate(says, edit, repair, _style(path, attention))


def _half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _angles(table: Tensor) -> Tensor:
    """One value a pair, whichever way the source lays its tables out."""
    half = table.shape[-1] // 2
    return table[..., :half] if bool((table[..., :half] == table[..., half:]).all()) else table[..., ::2]


def _turn(call: RotaryCall, halves: bool) -> tuple[Tensor, Tensor]:
    width = call.cos.shape[-1]
    cos, sin = _angles(call.cos), _angles(call.sin)
    wide = [(torch.cat((t, t), dim=-1) if halves else t.repeat_interleave(2, dim=-1)).unsqueeze(1) for t in (cos, sin)]

    def turned(x: Tensor) -> Tensor:
        part, rest = x[..., :width], x[..., width:]
        return torch.cat((part * wide[0] + (_half(part) if halves else _pairs(part)) * wide[1], rest), dim=-1)

    return turned(call.query), turned(call.key)


def _only(query: bool) -> _Rotation:
    def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
        q, k = plain(call)
        return (q, call.key) if query else (call.query, k)

    return form


_PAIRINGS: dict[str, _Rotation] = {
    "pairs neighbours (interleaved)": lambda call, _: _turn(call, halves=False),
    "pairs halves": lambda call, _: _turn(call, halves=True),
    "turns the other way": lambda call, plain: plain(replace(call, sin=-call.sin)),
    "turns q alone": _only(True),
    "turns k alone": _only(False),
    "has cos and sin exchanged": lambda call, plain: plain(replace(call, cos=call.sin, sin=call.cos)),
}


def _own_share(case: Case, attention: nn.Module) -> float:
    """The share of each head that the source rotates; 1 where it cannot be told."""
    head = float(getattr(attention, "head_dim", 0) or getattr(attention, "head_size", 0) or 0)
    counts = [len(getattr(rotary, name)) for rotary in rotary_modules(case.model) for name in frequency_names(rotary)]
    return 2 * max(counts) / head if head and counts else 1.0


def _last_channels(path: str, share: float) -> Candidate:
    """The rotation where it gets whole heads, handed the last channels first."""

    def edit(at: Case, surgery: Surgery) -> None:
        def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
            width = round(call.query.shape[-1] * share)
            turned = plain(replace(call, query=call.query.roll(width, -1), key=call.key.roll(width, -1)))
            return turned[0].roll(-width, -1), turned[1].roll(-width, -1)

        surgery.rotation(at.model.get_submodule(path), form)

    return Candidate(f"{path} rotates the last channels of each head", edit, "rotate the first channels")


def _whole_head(path: str, share: float, halves: bool) -> Candidate:
    """Undo the source's own rotation and turn another share of the head."""

    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)
        base = _base(at)
        if has_rotation(attention):
            surgery.rotation(attention, lambda call, _: (call.query, call.key))

        def turned(x: Tensor) -> Tensor:
            width = int(x.shape[-1] * share) // 2 * 2
            angles = torch.arange(x.shape[-2])[:, None] * _default(width // 2, base)[None]
            cos, sin = (
                (torch.cat((t, t), dim=-1) if halves else t.repeat_interleave(2, dim=-1)).to(x.dtype)
                for t in (angles.cos(), angles.sin())
            )
            part, rest = x[..., :width], x[..., width:]
            return torch.cat((part * cos + (_half(part) if halves else _pairs(part)) * sin, rest), dim=-1)

        surgery.core(attention, lambda call: replace(call, query=turned(call.query), key=turned(call.key)))

    return Candidate(
        f"{path} rotates {share:g} of each head{'' if halves else ', in pairs'}",
        edit,
        "rotate the share that partial_rotary_factor says",
    )


def _added(path: str) -> Candidate:
    """Rotate in a layer that has no rotation of its own, by the tables that the model makes."""

    def edit(at: Case, surgery: Surgery) -> None:
        attention = at.model.get_submodule(path)
        called: list[bool] = []
        if has_rotation(attention):

            def watch(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
                called.append(True)
                return plain(call)

            surgery.rotation(attention, watch)
        base = _base(at)
        interleaved = "interleav" in (type(attention).__module__) or type(attention).__name__.startswith("Cohere")

        def turned(x: Tensor) -> Tensor:
            angles = torch.arange(x.shape[-2])[:, None] * _default(x.shape[-1] // 2, base)[None]
            tables = RotaryCall(
                x, x, *(torch.cat((t, t), dim=-1)[None].to(x.dtype) for t in (angles.cos(), angles.sin()))
            )
            return _turn(tables, halves=not interleaved)[0]

        def core(call):  # type: ignore[no-untyped-def]
            return call if called else replace(call, query=turned(call.query), key=turned(call.key))

        surgery.core(attention, core)

    return Candidate(
        f"{path} rotates, where the source has no positions", edit, "leave q and k unrotated in this layer",
        RotationStyle(of=(path,), style="none"),
    )  # fmt: skip
