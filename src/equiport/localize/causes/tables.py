"""Rotary tables of any other frequencies, and tables whose angles were rounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part, rotary_modules
from equiport.localize.case import Case
from equiport.localize.causes.rotation import frequency_names
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import RotaryCall, Surgery, has_rotation


class FittedFrequencies(Hypothesis):
    """The tables are rotary tables, of frequencies that follow from no usual rule."""

    kind = "rope scaling or base"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The frequencies and the amplitude read from position 1; proven on all positions."""
        item = case.observations[0]
        rotary = next(iter(rotary_modules(case.model)), None)
        if item.places is not None or item.target.dim() != 2 or rotary is None or len(frequency_names(rotary)) != 1:
            return
        cos, sin = item.target.double().chunk(2, dim=-1)
        amplitude = float(torch.hypot(cos[1], sin[1]).mean())
        held: Tensor = getattr(rotary, frequency_names(rotary)[0])
        if len(cos) < 2 or cos.shape[-1] < len(held) or not amplitude:
            return
        turns = cos[1], sin[1]
        if cos.shape[-1] == 2 * len(held) and bool((cos[:, ::2] == cos[:, 1::2]).all()):
            turns = cos[1, ::2], sin[1, ::2]
        frequencies = torch.atan2(turns[1], turns[0])[: len(held)]
        ratio = frequencies / held.double()

        def edit(at: Case, surgery: Surgery) -> None:
            for one in rotary_modules(at.model):
                if "longrope" in str(getattr(one, "rope_type", "")):  # it sets its frequencies anew with each call
                    surgery.forward(one, _tables(one, frequencies.to(held.dtype), amplitude))
                    continue
                for name in frequency_names(one):
                    surgery.parameter(one, name, frequencies.to(held.dtype))
                if hasattr(one, "attention_scaling"):
                    surgery.attribute(one, "attention_scaling", amplitude)

        words = ", ".join(f"{float(value):.4g}" for value in ratio[:6]) + (" ..." if len(ratio) > 6 else "")
        yield Candidate(
            f"the rotary frequencies are {words} times the source's, with {amplitude:.6g} on cos and sin", edit,
            "compute them as the source does",
        )  # fmt: skip


class OtherKind(Hypothesis):
    """Layers of one kind use the frequencies of another kind, or another of the config's bases."""

    kind = "rope scaling or base"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On models that have frequencies for each kind of layer."""
        rotary = next(iter(rotary_modules(case.model)), None)
        names = frequency_names(rotary) if rotary is not None else []
        if rotary is None or len(names) < 2:
            return
        for name in names:
            held: Tensor = getattr(rotary, name)
            forms = {f"those of {other}": getattr(rotary, other) for other in names if other != name}
            for theta in _bases(case):
                forms[f"those of base {theta:g}, unscaled"] = theta ** -(torch.arange(len(held)) / len(held))
            for words, value in forms.items():
                if value.shape != held.shape or torch.allclose(value, held):
                    continue

                def edit(at: Case, surgery: Surgery, name: str = name, value: Tensor = value) -> None:
                    for one in rotary_modules(at.model):
                        surgery.parameter(one, name, value.to(getattr(one, name).dtype))

                yield Candidate(f"{name} of the rotary tables are {words}", edit, "give each kind of layer its own")


def _bases(case: Case) -> list[float]:
    """Every base in the config."""
    found = [case.number("rope_theta"), case.number("rope_local_base_freq")]
    for name in ("rope_parameters", "rope_scaling"):
        fields = getattr(case.config, name, None)
        if isinstance(fields, dict):
            found += [part.get("rope_theta") for part in (fields, *fields.values()) if isinstance(part, dict)]
    return list(dict.fromkeys(float(value) for value in found if isinstance(value, (int, float))))


class LatentPairing(Hypothesis):
    """Latent attention pairs halves where the source pairs neighbours, or the reverse."""

    kind = "rotation style"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """rope_interleave turned round, where the config has it."""
        own = getattr(case.config, "rope_interleave", None)
        if not isinstance(own, bool) or not any(True for _ in case.sites(Part.ATTENTION)):
            return

        def edit(at: Case, surgery: Surgery) -> None:
            surgery.attribute(at.config, "rope_interleave", not own)

        yield Candidate(
            f"the rotary channels are paired as {'halves' if own else 'neighbours'}", edit,
            f"rope_interleave is {own}",
        )  # fmt: skip


class TableLayout(Hypothesis):
    """q and k are paired in one way, with tables that are laid out for the other."""

    kind = "rotation style"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Halves with neighbours' tables, neighbours with halves' tables."""
        for path, module in case.sites(Part.ATTENTION):
            if not has_rotation(module):
                continue
            for halves, words in (
                (True, "halves, with tables laid out for neighbours"),
                (False, "neighbours, with tables laid out for halves"),
            ):

                def edit(at: Case, surgery: Surgery, path: str = path, halves: bool = halves) -> None:
                    surgery.rotation(at.model.get_submodule(path), lambda call, _: _mispaired(call, halves))

                yield Candidate(f"the rotation of {path} pairs {words}", edit, "lay tables and channels out alike")


def _mispaired(call: RotaryCall, halves: bool) -> tuple[Tensor, Tensor]:
    width = call.cos.shape[-1]
    alike = bool((call.cos[..., : width // 2] == call.cos[..., width // 2 :]).all())
    one = [table[..., : width // 2] if alike else table[..., ::2] for table in (call.cos, call.sin)]
    cos, sin = (
        (table.repeat_interleave(2, dim=-1) if halves else torch.cat((table, table), dim=-1)).unsqueeze(1)
        for table in one
    )

    def turned(x: Tensor) -> Tensor:
        part, rest = x[..., :width], x[..., width:]
        left, right = (
            (part[..., : width // 2], part[..., width // 2 :]) if halves else (part[..., ::2], part[..., 1::2])
        )
        other = torch.cat((-right, left), dim=-1) if halves else torch.stack((-right, left), dim=-1).flatten(-2)
        return torch.cat((part * cos + other * sin, rest), dim=-1)

    return turned(call.query), turned(call.key)


class LowAngles(Hypothesis):
    """Positions are multiplied by frequencies in bf16, in every run."""

    kind = "precision order"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Angles or frequencies alone rounded."""
        if not any(True for _ in case.sites(Part.ROTARY)):
            return
        for words, whole in (("angles", True), ("frequencies", False)):

            def edit(at: Case, surgery: Surgery, whole: bool = whole) -> None:
                for one in rotary_modules(at.model):
                    for name in frequency_names(one):
                        low = getattr(one, name).to(torch.bfloat16)
                        surgery.forward(one, _tables(one, low if whole else low.float()))

            yield Candidate(f"rotary {words} are rounded to bf16", edit, "compute angles in fp32")


def _tables(rotary: nn.Module, frequencies: Tensor, amplitude: float | None = None):  # type: ignore[no-untyped-def]
    scale = float(getattr(rotary, "attention_scaling", 1.0)) if amplitude is None else amplitude

    def forward(x: Tensor, position_ids: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(frequencies.dtype) * frequencies
        wide = torch.cat((angles, angles), dim=-1).float()
        return (wide.cos() * scale).to(x.dtype), (wide.sin() * scale).to(x.dtype)

    return forward
