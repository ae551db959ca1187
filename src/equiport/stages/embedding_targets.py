"""Where a target's embeddings come from: a callable, or a file that another stack wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equiport.errors import EquiportError
from equiport.fixtures.embedding_plan import EmbeddingItem, EmbeddingPlan

_NAMES = ("alone", "batched", "swapped")


@dataclass(frozen=True)
class TargetVectors:
    """What a target gave, float [N, D] each: every prompt alone, in its batch, and among other neighbours.

    `notes` may explain a failure; `blind_spots` are what these vectors cannot show.
    """

    alone: Tensor
    batched: Tensor | None = None
    swapped: Tensor | None = None
    notes: tuple[str, ...] = ()
    blind_spots: tuple[str, ...] = ()


class EmbeddingTarget(Protocol):
    """Something that embeds. `files`: what its vectors rest on, where they are files."""

    @property
    def name(self) -> str:
        """For results and reports."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Files to hash."""

    def vectors(self, plan: EmbeddingPlan) -> TargetVectors:
        """Embed what the plan asks for."""


Embed = Callable[[Sequence[EmbeddingItem]], Tensor]


def run_plan(plan: EmbeddingPlan, embed: Embed) -> TargetVectors:
    """Every request of the plan through `embed`, which takes one batch and gives [B, D].

    Raises:
        EquiportError: a batch gives another number of vectors than it has rows, or vectors of several widths.
    """
    alone = [_checked(embed([item]), 1) for item in plan.items]
    batched: dict[int, Tensor] = {}
    swapped: dict[int, Tensor] = {}
    for batch in plan.batches:
        found = _checked(embed([plan.items[row] for row in batch]), len(batch))
        batched.update(zip(batch, found, strict=True))
        for kept in (0, 1):
            found = _checked(embed(plan.swapped(batch, kept)), len(batch))
            swapped.update({row: found[place] for place, row in enumerate(batch) if place % 2 == kept})
    order = range(len(plan.items))
    return TargetVectors(
        _stacked([rows[0] for rows in alone]),
        _stacked([batched[row] for row in order]),
        _stacked([swapped[row] for row in order]),
    )


@dataclass(frozen=True)
class CallableTarget:
    """A function that embeds one batch, called with lists of token ids or with texts; it gives a tensor [B, D]."""

    function: Callable[[list[list[int]]], Tensor] | Callable[[list[str]], Tensor]
    name: str = "callable"
    takes: Literal["ids", "text"] = "ids"
    files: tuple[Path, ...] = ()

    def vectors(self, plan: EmbeddingPlan) -> TargetVectors:
        """Embed what the plan asks for."""

        def embed(batch: Sequence[EmbeddingItem]) -> Tensor:
            given = [list(item.ids) if self.takes == "ids" else item.text for item in batch]
            if None in given:
                raise EquiportError("a prompt is token ids, the target takes text", remedy="Give prompts of text.")
            return torch.as_tensor(self.function(given))  # type: ignore[arg-type]

        return run_plan(plan, embed)


@dataclass(frozen=True)
class FileTarget:
    """A safetensors file with the vectors of a plan; its form is in the plan's own file."""

    path: Path

    @property
    def name(self) -> str:
        """The file."""
        return f"file {self.path.name}"

    @property
    def files(self) -> tuple[Path, ...]:
        """The file."""
        return (self.path,)

    def vectors(self, plan: EmbeddingPlan) -> TargetVectors:
        """Read the file.

        Raises:
            EquiportError: no safetensors, of another plan, without `alone`, with unknown tensors or wrong shapes.
        """
        remedy = "--write-plan FILE.json says what belongs into it."
        try:
            with safe_open(str(self.path), framework="pt") as handle:
                said = (handle.metadata() or {}).get("plan")
                tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise EquiportError(f"is no safetensors file ({error})", where=self.path, remedy=remedy) from None
        if said != plan.digest:
            what = "says no plan in its metadata" if said is None else "was made for other prompts, model or batches"
            raise EquiportError(what, where=self.path, field="plan", remedy=remedy)
        unknown = sorted(set(tensors) - set(_NAMES))
        if unknown or "alone" not in tensors:
            what = f"holds {unknown[0]}, which is not known" if unknown else "lacks alone"
            raise EquiportError(what, where=self.path, field="tensors", remedy=remedy)
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or tensor.dim() != 2 or len(tensor) != len(plan.items):
                raise EquiportError(
                    f"is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, "
                    f"floating numbers [{len(plan.items)}, width] are needed",
                    where=self.path,
                    field=name,
                    remedy=remedy,
                )
        return TargetVectors(tensors["alone"], tensors.get("batched"), tensors.get("swapped"))


def save_vectors(path: Path, plan: EmbeddingPlan, vectors: TargetVectors) -> Path:
    """Write what `FileTarget` reads.

    Raises:
        EquiportError: the file cannot be written.
    """
    tensors = {"alone": vectors.alone, "batched": vectors.batched, "swapped": vectors.swapped}
    return save_tensors(path, {name: given for name, given in tensors.items() if given is not None}, plan)


def save_tensors(path: Path, tensors: dict[str, Tensor], plan: EmbeddingPlan) -> Path:
    """Write tensors with the plan's digest, whole or not at all.

    Raises:
        EquiportError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        save_file(whole, str(temporary), metadata={"plan": plan.digest})
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        raise EquiportError(f"cannot be written: {error}", where=path, remedy="Choose a writable folder.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _checked(found: Tensor, rows: int) -> Tensor:
    if found.dim() != 2 or len(found) != rows or not found.is_floating_point():
        raise EquiportError(
            f"the target gave {str(found.dtype).removeprefix('torch.')} {list(found.shape)} for {rows} prompts",
            field="target",
            remedy="It must give floating numbers [prompts, width].",
        )
    return found.detach().cpu()


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    widths = sorted({len(row) for row in rows})
    if len(widths) > 1:
        raise EquiportError(
            f"the target gave vectors of {widths[0]} and of {widths[-1]} numbers", field="target", remedy="Check it."
        )
    return torch.stack(list(rows))
