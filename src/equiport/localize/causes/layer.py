"""Decoder layers: residuals dropped or scaled, norms skipped or moved, branches in parallel or in series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part, part_of
from equiport.localize.case import Case
from equiport.localize.causes.scale import named_factors
from equiport.localize.drafts import OwnWeights, SwapWeights
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_BRANCHES = (Part.ATTENTION, Part.MLP, Part.MOE)


def _children(layer: nn.Module, *parts: Part) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in layer.named_children() if part_of(child) in parts]


class Residual(Hypothesis):
    """A residual is dropped, or a branch is added twice, not at all, or scaled."""

    kind = "residual layout or multiplier"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Edits of the layer's own multiplier, of each branch, and of parallel against serial."""
        for path, layer in case.sites(Part.LAYER):
            yield from self._multipliers(case, path, layer)
            for name, _ in _children(layer, *_BRANCHES):
                yield _branch(path, name, 0.0, f"{path}.{name} is left out")
                yield _branch(path, name, 2.0, f"{path}.{name} is added twice")
                for named in named_factors(case):
                    yield _branch(path, name, named.value, f"{path}.{name} is multiplied by {named.words}")
                yield _no_residual(path, name)
            yield from self._parallel(path, layer)

    def _multipliers(self, case: Case, path: str, layer: nn.Module) -> Iterable[Candidate]:
        held = getattr(layer, "residual_multiplier", None)
        if not isinstance(held, (int, float)):
            return
        for value, words in ((1.0, "dropped"), (held**2, "applied twice"), (1 / held, "inverted")):

            def edit(at: Case, surgery: Surgery, value: float = value) -> None:
                surgery.attribute(at.model.get_submodule(path), "residual_multiplier", value)

            yield Candidate(
                f"the residual multiplier of {path} ({held:g}) is {words}", edit, f"multiply each branch by {held:g}",
            )  # fmt: skip

    def _parallel(self, path: str, layer: nn.Module) -> Iterable[Candidate]:
        if hasattr(layer, "use_parallel_residual"):
            own = bool(layer.use_parallel_residual)

            def toggle(at: Case, surgery: Surgery) -> None:
                surgery.attribute(at.model.get_submodule(path), "use_parallel_residual", not own)

            yield Candidate(
                f"the branches of {path} run {'in series' if own else 'in parallel'}", toggle,
                "lay the residuals as the source does",
            )  # fmt: skip
            return
        norms = _children(layer, Part.NORM)
        branches = _children(layer, *_BRANCHES)
        if len(norms) < 1 or len(branches) != 2:
            return

        def edit(at: Case, surgery: Surgery) -> None:
            """The second branch gets the layer's own input where it gets the first branch's sum, and the reverse."""
            own = at.model.get_submodule(path)
            first = own.get_submodule(branches[0][0])
            kept: dict[str, Tensor] = {}
            surgery.input(own, lambda x: kept.setdefault("in", x) if not kept.update({"in": x}) else x)
            surgery.output(first, lambda _, out: kept.setdefault("out", out) if not kept.update({"out": out}) else out)
            second = own.get_submodule(norms[-1][0] if len(norms) == 2 else branches[1][0])
            serial = len(norms) == 2

            def moved(x: Tensor) -> Tensor:
                return kept["in"] if serial else x + kept["out"]

            surgery.input(second, moved)

        yield Candidate(
            f"the second branch of {path} reads the layer's input, not the first branch's sum (or the reverse)",
            edit,
            "lay the residuals as the source does",
        )


def _branch(path: str, name: str, factor: float, says: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        surgery.output(at.model.get_submodule(f"{path}.{name}"), lambda _, out: out * factor)

    return Candidate(says, edit, "add the branch as the source does")


def _no_residual(path: str, name: str) -> Candidate:
    """The stream before the branch is lost: what the next residual adds is the branch alone."""

    def edit(at: Case, surgery: Surgery) -> None:
        layer = at.model.get_submodule(path)
        kept: dict[str, Tensor] = {}

        def stream(x: Tensor) -> Tensor:
            kept["x"] = x
            return x

        surgery.input(layer, stream)
        first = next(child for child, _ in _children(layer, *_BRANCHES))
        if name != first:
            attention = layer.get_submodule(first)

            def carried(_: Tensor, out: Tensor) -> Tensor:
                kept["x"] = kept["x"] + out
                return out

            surgery.output(attention, carried)
        surgery.output(layer.get_submodule(name), lambda _, out: out - kept["x"])

    return Candidate(f"the residual around {path}.{name} is dropped", edit, "add the residual")


class NormPlace(Hypothesis):
    """A norm of the layer is skipped, or stands after the branch where the source has it before (and the reverse)."""

    kind = "norm placement"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each norm skipped; each pair of norms exchanged; pre against post."""
        for path, layer in case.sites(Part.LAYER):
            norms = [name for name, _ in _children(layer, Part.NORM)]
            for name in norms:

                def skip(at: Case, surgery: Surgery, path: str = path, name: str = name) -> None:
                    surgery.output(at.model.get_submodule(f"{path}.{name}"), lambda x, out: x)

                yield Candidate(f"{path}.{name} is skipped", skip, f"apply {name}")
            for first, second in zip(norms, norms[1:], strict=False):
                yield _exchanged(f"{path}.{first}", f"{path}.{second}")
            branches = [name for name, _ in _children(layer, *_BRANCHES)]
            if len(norms) == 2 and len(branches) == 2:
                yield _moved_norms(path, tuple(norms), tuple(branches))


def _exchanged(first: str, second: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        one, two = at.model.get_submodule(first), at.model.get_submodule(second)
        mine, other = one.weight, two.weight
        assert isinstance(mine, Tensor) and isinstance(other, Tensor)
        surgery.parameter(one, "weight", other.detach().clone())
        surgery.parameter(two, "weight", mine.detach().clone())

    draft = SwapWeights(of=(first, second))
    return Candidate(f"{first} and {second} are exchanged", edit, "load each norm's own weight", draft)


def _after(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda _, out: norm(out)


def _moved_norms(path: str, norms: tuple[str, ...], branches: tuple[str, ...]) -> Candidate:
    """Norm the branch's output where the source norms its input; or the reverse."""

    def edit(at: Case, surgery: Surgery) -> None:
        layer = at.model.get_submodule(path)
        for norm_name, branch_name in zip(norms, branches, strict=True):
            norm, branch = layer.get_submodule(norm_name), layer.get_submodule(branch_name)
            original = norm.forward
            fed: list[int] = []

            def held(x: Tensor, fed: list[int] = fed) -> Tensor:
                fed.append(1)
                return x

            surgery.forward(norm, held)
            before = "post" not in norm_name or norm_name == "post_attention_layernorm" and "input_layernorm" in norms

            surgery.output(branch, _after(original)) if before else surgery.input(branch, original)

    return Candidate(
        f"the norms of {path} stand on the other side of their branches", edit, "norm where the source does"
    )


class Swapped(Hypothesis):
    """Another module of the layer's shape stands in the place: a norm holds its neighbour's weights."""

    kind = "wrong layer's weights"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """For a norm: the weights of every other norm of the model with its size."""
        for path in () if case.is_entry else case.sources:
            module = case.model.get_submodule(path)
            weight = getattr(module, "weight", None)
            if part_of(module) is not Part.NORM or not isinstance(weight, Tensor):
                continue
            for other, theirs in case.model.named_modules():
                held = getattr(theirs, "weight", None)
                if other == path or part_of(theirs) is not Part.NORM or not isinstance(held, Tensor):
                    continue
                if held.shape != weight.shape or torch.equal(held, weight):
                    continue

                def edit(at: Case, surgery: Surgery, path: str = path, other: str = other) -> None:
                    value = at.model.get_submodule(other).weight
                    assert isinstance(value, Tensor)
                    surgery.parameter(at.model.get_submodule(path), "weight", value.detach().clone())

                draft = OwnWeights(of=(path,), other=other)
                yield Candidate(f"{path} holds the weight of {other}", edit, "load each norm's own weight", draft)
