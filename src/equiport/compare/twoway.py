"""compare_2tensors: where the reference exists in the target's precision only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equiport.compare.check import recording_refusals
from equiport.compare.comparison import Comparison, Labels
from equiport.compare.measure import Baseline, BlockReader, Sources, TensorBaseline
from equiport.compare.streams import CHUNK_ELEMENTS, Index, accept, blocks, load, require_same_shape
from equiport.compare.threeway import build_comparison, holds_integers
from equiport.errors import EquiportError


@dataclass(frozen=True)
class EpsilonBaseline:
    """The reference with every element moved by up to half a machine epsilon of its precision, relative."""

    precision: torch.dtype
    seed: int

    def open(self) -> BlockReader:
        generator = torch.Generator().manual_seed(self.seed)
        half = torch.finfo(self.precision).eps / 2

        def read(_index: Index, ref: Tensor) -> Tensor:
            noise = torch.rand(ref.shape, generator=generator, dtype=torch.float64) * 2 - 1
            return ref * (1 + half * noise)

        return read


def epsilon_draws(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], *, draws: int = 5, seed: int = 42
) -> tuple[Tensor, ...]:
    """Outputs of `function(*inputs)` for `draws` perturbations of its floating-point inputs.

    Each element is moved by a uniform relative amount of up to one machine epsilon of its dtype and rounded again, so
    that it stays or becomes a neighbour. Integer inputs (ids, positions) stay as they are.

    Raises:
        EquiportError: `draws` below 1.
    """
    _positive(draws)
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    with torch.no_grad():
        for _ in range(draws):
            # a copy: the function may return one cached buffer each time
            outputs.append(function(*(_perturbed(value, generator) for value in inputs)).detach().clone())
    return tuple(outputs)


@recording_refusals
def compare_2tensors(
    reference: Tensor,
    target: Tensor,
    *,
    name: str = "",
    draws: Sequence[Tensor] | int = 5,
    precision: torch.dtype | None = None,
    seed: int = 42,
    plots_dir: str | Path | None = None,
    labels: Labels | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Comparison:
    """Measure a port against a reference that cannot run in fp32.

    The baseline is the reference under machine-epsilon perturbations. `draws`: outputs of the reference for perturbed
    inputs (`epsilon_draws` makes them: the right baseline), or a number of draws that perturb the reference's output
    elementwise (a weaker one: it knows nothing of how the component amplifies rounding). Baseline errors are pooled
    over draws in the mean square. `precision` of the elementwise draws: default is the reference's dtype, bf16 where
    a wider tensor holds bf16 values only. Metrics are those of `compare_3tensors` with the reference in place of
    ref_fp32; there is no fp32 evidence.

    Source: seed 003 (2-tensor method).

    Raises:
        ComparisonError: shapes differ or a tensor cannot be compared.
        EquiportError: no draws, or a precision that is no floating-point dtype.
    """
    tensors = {"reference": accept(reference, "reference", name), "target": accept(target, "target", name)}
    given: dict[str, Tensor] = {}
    baselines: list[Baseline]
    if isinstance(draws, int):
        _positive(draws)
        chosen = precision or _precision(tensors["reference"])
        if not chosen.is_floating_point:
            raise EquiportError(f"{chosen} has no machine epsilon", where=name, field="precision")
        baselines = [EpsilonBaseline(chosen, seed + draw) for draw in range(draws)]
        baseline = f"epsilon-output:{draws}"
    else:
        _positive(len(draws))
        given = {f"draw_{at}": accept(draw, f"draw_{at}", name) for at, draw in enumerate(draws)}
        baselines = [TensorBaseline(draw) for draw in given.values()]
        baseline = f"epsilon-input:{len(given)}"
    require_same_shape({**tensors, **given}, name)
    sources = Sources(
        ref=tensors["reference"],
        baselines=baselines,
        target=tensors["target"],
        target_fp32=None,
        anchor=tensors["reference"],
        integers=holds_integers(*tensors.values()),
    )
    return build_comparison(
        sources,
        {**tensors, **given},
        name=name,
        baseline=baseline,
        method="2-tensor",
        labels=labels or Labels(),
        plots_dir=plots_dir,
        chunk_elements=chunk_elements,
    )


def _positive(draws: int) -> None:
    if draws < 1:
        raise EquiportError("at least one draw is needed", field="draws", remedy="Draw 5.")


def _perturbed(value: Tensor, generator: torch.Generator) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    eps = torch.finfo(value.dtype).eps
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (value.to(torch.float64) * (1 + eps * noise.to(value.device))).to(value.dtype)


def _precision(reference: Tensor) -> torch.dtype:
    if not reference.is_floating_point():
        return torch.float32
    if reference.dtype in (torch.float32, torch.float64):
        narrow = all(
            bool((block.to(torch.bfloat16).to(torch.float64) == block)[block.isfinite()].all())
            for block in (load(reference, index) for index in blocks(tuple(reference.shape)))
        )
        return torch.bfloat16 if narrow else reference.dtype
    return reference.dtype
