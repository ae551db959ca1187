"""What the residual carries, and which norm a branch reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part, part_of
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery


def _norms(layer: nn.Module) -> list[str]:
    return [name for name, child in layer.named_children() if part_of(child) is Part.NORM]


class NormedResidual(Hypothesis):
    """The residual is taken behind the norm that the branch reads."""

    kind = "residual layout or multiplier"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Of the last norm of a layer with two: its input is the stream that the layer's output holds."""
        for path, layer in case.sites(Part.LAYER):
            names = _norms(layer)
            if len(names) != 2:
                continue

            def edit(at: Case, surgery: Surgery, path: str = path, name: str = names[1]) -> None:
                own = at.model.get_submodule(path)
                kept: dict[str, Tensor] = {}

                def normed(x: Tensor, out: Tensor) -> Tensor:
                    kept.update(before=x, after=out)
                    return out

                surgery.output(own.get_submodule(name), normed)
                surgery.output(own, lambda _, out: out - kept["before"] + kept["after"])

            yield Candidate(
                f"the residual of {path} is what comes out of {names[1]}, not what goes in", edit,
                "keep the residual from before the norm",
            )  # fmt: skip


class OneNorm(Hypothesis):
    """Two branches read one norm, where the source has one each."""

    kind = "norm placement"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each norm of a layer in place of each other."""
        for path, layer in case.sites(Part.LAYER):
            names = _norms(layer)
            for used in names:
                for place in names:
                    if used == place:
                        continue

                    def edit(
                        at: Case, surgery: Surgery, path: str = path, used: str = used, place: str = place
                    ) -> None:
                        own = at.model.get_submodule(path)
                        source, target = own.get_submodule(used), own.get_submodule(place)
                        for name, value in source.named_parameters():
                            if isinstance(getattr(target, name, None), Tensor):
                                surgery.parameter(target, name, value.detach().clone())

                    yield Candidate(f"{path}.{used} stands for {place} too", edit, f"use {place}")


class ExchangedNorms(Hypothesis):
    """Two norms inside an attention hold each other's weights."""

    kind = "wrong layer's weights"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each pair of norms of one shape."""
        for path, attention in case.sites(Part.ATTENTION):
            names = _norms(attention)
            for number, first in enumerate(names):
                for second in names[number + 1 :]:

                    def edit(
                        at: Case, surgery: Surgery, path: str = path, first: str = first, second: str = second
                    ) -> None:
                        one, two = (at.model.get_submodule(f"{path}.{name}") for name in (first, second))
                        mine, other = one.weight, two.weight
                        assert isinstance(mine, Tensor) and isinstance(other, Tensor) and mine.shape == other.shape
                        surgery.parameter(one, "weight", other.detach().clone())
                        surgery.parameter(two, "weight", mine.detach().clone())

                    yield Candidate(f"{path}.{first} and {second} are exchanged", edit, "load each norm's own weight")


class EpsPlace(Hypothesis):
    """eps stands outside the root, or is added to the sum of squares."""

    kind = "eps"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On norms that take no mean off."""
        for path, module in case.sites(Part.NORM):
            weight = getattr(module, "weight", None)
            eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
            if (
                not isinstance(weight, Tensor)
                or not isinstance(eps, float)
                or getattr(module, "bias", None) is not None
            ):
                continue
            for words, outside in (("outside the root", True), ("added to the sum of squares", False)):

                def edit(
                    at: Case, surgery: Surgery, path: str = path, outside: bool = outside, eps: float = eps
                ) -> None:
                    norm = at.model.get_submodule(path)
                    offset = 1.0 if "gemma" in type(norm).__name__.lower() else 0.0

                    def form(x: Tensor, out: Tensor) -> Tensor:
                        wide = x.float()
                        square = wide.pow(2).mean(-1, keepdim=True)
                        scale = 1 / (square.sqrt() + eps) if outside else torch.rsqrt(square + eps / x.shape[-1])
                        return (wide * scale * (norm.weight + offset)).to(out.dtype)  # type: ignore[operator]

                    surgery.output(norm, form)

                yield Candidate(f"eps of {path} stands {words}", edit, "add eps to the mean square, under the root")
