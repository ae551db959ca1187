"""Embeddings of the same prompts by target and reference, measured: vectors in, raw figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from equiport.compare.numbers import Frozen, Number

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class EmbeddingTensors:
    """Vectors of N prompts, each [N, D] and floating point; row i is prompt i everywhere.

    `target`: each prompt by itself. `batched`: in batches; `swapped`: in batches of the same lengths whose other rows
    say something else, for the rows in `swaps`. `batch_noise`: the reference's own 1 - cosine, alone and in batches.
    `padded`: every prompt had a neighbour of another length.
    """

    target: Tensor
    ref_bf16: Tensor
    ref_fp32: Tensor
    batched: Tensor | None = None
    swapped: Tensor | None = None
    swaps: tuple[bool, ...] = ()
    batch_noise: float = 0.0
    padded: bool = False
    precision: Precision = "bf16"


class PromptFigures(Frozen):
    """One prompt. Distances are 1 - cosine, computed in float64 without cancellation."""

    prompt: str
    distance: Number  # target, alone, from the reference of the target's precision
    distance_fp32: Number  # target from ref_fp32
    baseline: Number  # ref_bf16 from ref_fp32
    norm: Number
    norm_reference: Number
    norm_baseline: Number  # |norm of ref_bf16 / norm of ref_fp32 - 1|
    batched: Number | None = None  # alone from batched
    swapped: Number | None = None  # batched from the same batch with other neighbours
    nearest: int = 0  # the prompt whose reference the target is nearest to

    @property
    def cosine(self) -> float:
        """With the reference of the target's precision."""
        return 1.0 - self.distance


class CrossFigures(Frozen):
    """Prompts against one another: cosines of all pairs, and the spread of directions around their mean.

    `spread` is the mean squared distance of unit vectors from their mean; errors' energies are in the same unit.
    """

    target_mean: Number
    target_max: Number
    reference_mean: Number
    reference_max: Number
    difference: Number  # largest |target's cosine - reference's| over pairs
    difference_baseline: Number
    spread_ratio: Number
    spread_ratio_baseline: Number
    error_share: Number  # energy of the target's error / the reference's spread
    noise_share: Number  # that of ref_bf16
    confused_baseline: int  # prompts whose ref_bf16 is nearer to another prompt's ref_fp32


class EmbeddingComparison(Frozen):
    """Everything measured of one target. `faults`: (what, prompt) that forbid measuring; no other figure is there."""

    precision: Precision
    width: int
    faults: tuple[tuple[str, str, str], ...] = ()  # kind, prompt, what
    prompts: tuple[PromptFigures, ...] = ()
    cross: CrossFigures | None = None
    r_pooled: Number | None = None
    batch_noise: Number = 0.0
    padded: bool = False
    batched: bool = False
    identical_batch: bool = False


def compare_embeddings(vectors: EmbeddingTensors, labels: Sequence[str]) -> EmbeddingComparison:
    """Measure; `labels` name the prompts.

    Raises:
        ValueError: the references differ in shape, or labels and rows in number: a fault of the caller.
    """
    bf16, fp32 = vectors.ref_bf16.double(), vectors.ref_fp32.double()
    if bf16.shape != fp32.shape or bf16.dim() != 2 or len(labels) != len(bf16):
        raise ValueError(f"references {list(bf16.shape)}, {list(fp32.shape)} and {len(labels)} labels")
    if not (torch.isfinite(bf16).all() and torch.isfinite(fp32).all() and (fp32.norm(dim=1) > 0).all()):
        raise ValueError("a reference is NaN, infinite or zero")
    width = fp32.shape[1]
    faults = tuple(_faults(vectors, labels, width))
    if faults:
        return EmbeddingComparison(precision=vectors.precision, width=width, faults=faults)
    reference = bf16 if vectors.precision == "bf16" else fp32
    target = vectors.target.double()
    ours, theirs, exact, rounded = _unit(target), _unit(reference), _unit(fp32), _unit(bf16)
    batched = None if vectors.batched is None else _unit(vectors.batched.double())
    swapped = None if vectors.swapped is None else _unit(vectors.swapped.double())
    distances, from_fp32, baseline = _apart(ours, theirs), _apart(ours, exact), _apart(rounded, exact)
    norms, reference_norms = target.norm(dim=1), reference.norm(dim=1)
    norm_noise = (bf16.norm(dim=1) / fp32.norm(dim=1) - 1).abs()
    nearest = (ours @ theirs.T).argmax(dim=1)
    in_batch = None if batched is None else _apart(ours, batched)
    among_others = None if batched is None or swapped is None else _apart(batched, swapped)
    rows = tuple(
        PromptFigures(
            prompt=label,
            distance=float(distances[row]),
            distance_fp32=float(from_fp32[row]),
            baseline=float(baseline[row]),
            norm=float(norms[row]),
            norm_reference=float(reference_norms[row]),
            norm_baseline=float(norm_noise[row]),
            batched=None if in_batch is None else float(in_batch[row]),
            swapped=None if among_others is None or not vectors.swaps[row] else float(among_others[row]),
            nearest=int(nearest[row]),
        )
        for row, label in enumerate(labels)
    )
    return EmbeddingComparison(
        precision=vectors.precision,
        width=width,
        prompts=rows,
        cross=_cross(ours, theirs, exact, rounded) if len(labels) > 1 else None,
        r_pooled=_ratio(float(from_fp32.sum()), float(baseline.sum())),
        batch_noise=vectors.batch_noise,
        padded=vectors.padded,
        batched=batched is not None,
        identical_batch=vectors.batched is not None and torch.equal(vectors.batched, vectors.target),
    )


def distance(left: Tensor, right: Tensor) -> Tensor:
    """1 - cosine of each pair of rows: float64 [N] from two [N, D]."""
    return _apart(_unit(left.double()), _unit(right.double()))


def _faults(vectors: EmbeddingTensors, labels: Sequence[str], width: int) -> list[tuple[str, str, str]]:
    found = []
    for name, given in (("alone", vectors.target), ("batched", vectors.batched), ("swapped", vectors.swapped)):
        if given is None:
            continue
        if given.dim() != 2 or given.shape[0] != len(labels):
            found.append(("shape", "", f"{name}: shape {list(given.shape)} for {len(labels)} prompts"))
        elif given.shape[1] != width:
            found.append(("shape", "", f"{name}: {given.shape[1]} numbers a vector, the reference has {width}"))
        else:
            for label, row in zip(labels, given.double(), strict=True):
                if not torch.isfinite(row).all():
                    found.append(("finite", label, f"{name}: NaN or infinite"))
                elif not row.norm() > 0:
                    found.append(("zero", label, f"{name}: a zero vector"))
    return found


def _unit(rows: Tensor) -> Tensor:
    # a vector of huge or tiny numbers has a norm that overflows before its direction does
    scaled = rows / rows.abs().amax(dim=1, keepdim=True)
    return scaled / scaled.norm(dim=1, keepdim=True)


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """1 - cosine of unit rows, without the cancellation of a difference of two numbers near 1."""
    return (left - right).square().sum(dim=1) / 2


def _ratio(error: float, base: float) -> float:
    return (error / base) ** 0.5 if base > 0 else 0.0 if error == 0 else float("inf")


def _cross(ours: Tensor, theirs: Tensor, exact: Tensor, rounded: Tensor) -> CrossFigures:
    pairs = torch.triu_indices(len(ours), len(ours), offset=1)

    def cosines(rows: Tensor) -> Tensor:
        return (rows @ rows.T)[pairs[0], pairs[1]]

    def spread(rows: Tensor) -> float:
        return float((rows - rows.mean(dim=0)).square().sum(dim=1).mean())

    mine, reference, base = cosines(ours), cosines(theirs), cosines(exact)
    nearest = (rounded @ exact.T).argmax(dim=1)
    wide, wide_exact = spread(theirs), spread(exact)
    return CrossFigures(
        target_mean=float(mine.mean()),
        target_max=float(mine.max()),
        reference_mean=float(reference.mean()),
        reference_max=float(reference.max()),
        difference=float((mine - reference).abs().max()),
        difference_baseline=float((cosines(rounded) - base).abs().max()),
        spread_ratio=spread(ours) / wide if wide else float("inf"),
        spread_ratio_baseline=spread(rounded) / wide_exact if wide_exact else float("inf"),
        error_share=2 * float(_apart(ours, theirs).mean()) / wide if wide else float("inf"),
        noise_share=2 * float(_apart(rounded, exact).mean()) / wide_exact if wide_exact else float("inf"),
        confused_baseline=int((nearest != torch.arange(len(ours))).sum()),
    )
