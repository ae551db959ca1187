"""Walk several tensors together in float64 blocks, so that extra memory is bounded by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from equiport.compare.reasons import ReasonCode
from equiport.errors import EquiportError

#: Elements of one block; a block in float64 is 1 MiB.
CHUNK_ELEMENTS = 1 << 17
#: Finite values from here on are mask fills (-1e9, finfo.min), not numbers: in bf16 the rounding of a fill is larger
#: than anything beside it, and would hide a dropped position bias.
FILL = 1e8
#: Fills of two tensors agree within this, relative (bf16 rounds them by up to 0.4 %).
FILL_AGREES = 0.01

PLAIN, NAN, POS_INF, NEG_INF, POS_FILL, NEG_FILL, OTHER_FILL = range(7)

Index = tuple[slice, ...]


class ComparisonError(EquiportError):
    """Tensors that cannot be compared; `code` is the reason's code."""

    def __init__(self, code: ReasonCode, what: str, *, where: str = "", field: str = "", remedy: str = "") -> None:
        self.code = code
        super().__init__(what, where=where, field=field, remedy=remedy)


def accept(value: Any, role: str, name: str) -> Tensor:
    """`value` as a detached tensor, any real dtype, any strides, any device.

    Raises:
        ComparisonError: no tensor, or complex, sparse, quantised or without data.
    """
    if isinstance(value, (tuple, list)):
        raise ComparisonError(
            ReasonCode.UNSUPPORTED_TENSOR,
            f"expected a tensor, got a {type(value).__name__}",
            where=name,
            field=role,
            remedy="Pick the output to compare: out[0] if isinstance(out, tuple) else out.",
        )
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ComparisonError(
            ReasonCode.UNSUPPORTED_TENSOR, f"expected a tensor, got {type(value).__name__}", where=name, field=role
        ) from error
    kind = (
        "complex"
        if tensor.is_complex()
        else "sparse"
        if tensor.layout is not torch.strided
        else "quantised"
        if tensor.is_quantized
        else "data-less (meta)"
        if tensor.is_meta
        else ""
    )
    if kind:
        raise ComparisonError(
            ReasonCode.UNSUPPORTED_TENSOR,
            f"a {kind} tensor cannot be compared",
            where=name,
            field=role,
            remedy="Pass a dense real tensor; compare real and imaginary parts one by one.",
        )
    return tensor


def require_same_shape(tensors: dict[str, Tensor], name: str) -> None:
    """Refuse different shapes: no broadcasting, no cropping, no flattening.

    Raises:
        ComparisonError: names both shapes.
    """
    first, *others = tensors.items()
    for role, tensor in others:
        if tensor.shape != first[1].shape:
            raise ComparisonError(
                ReasonCode.SHAPE_MISMATCH,
                f"shapes differ: {first[0]} {list(first[1].shape)}, {role} {list(tensor.shape)}",
                where=name,
                field=role,
                remedy="Align the shapes before calling the comparison (fused outputs, batch dimension, padding).",
            )


def share_memory(first: Tensor, second: Tensor) -> bool:
    """True when both are the same elements of the same memory: the same object, or a view that starts there."""
    if first is second:
        return True
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    return first.data_ptr() == second.data_ptr()


def blocks(shape: tuple[int, ...], chunk: int = CHUNK_ELEMENTS) -> Iterator[Index]:
    """Indices of blocks of at most `chunk` elements that cover `shape` once, in row-major order."""
    if not prod(shape):
        return
    if not shape:
        yield ()
        return
    axis = len(shape) - 1
    while axis > 0 and prod(shape[axis:]) <= chunk:
        axis -= 1
    step = max(1, chunk // prod(shape[axis + 1 :]))
    rest = tuple(slice(0, size) for size in shape[axis + 1 :])
    for lead in product(*(range(size) for size in shape[:axis])):
        head = tuple(slice(i, i + 1) for i in lead)
        for start in range(0, shape[axis], step):
            yield (*head, slice(start, min(start + step, shape[axis])), *rest)


def load(tensor: Tensor, index: Index) -> Tensor:
    """One block of `tensor` in float64 on the CPU."""
    return tensor[index].to(device="cpu", dtype=torch.float64)


def classes(block: Tensor) -> Tensor | None:
    """uint8 codes of NaN, Inf and mask fills in a float64 block; None when there is none."""
    if bool(block.abs().amax() < FILL):
        return None
    codes = torch.zeros(block.shape, dtype=torch.uint8)
    codes[block >= FILL] = POS_FILL
    codes[block <= -FILL] = NEG_FILL
    codes[block == torch.inf] = POS_INF
    codes[block == -torch.inf] = NEG_INF
    codes[block.isnan()] = NAN
    return codes


def other_fills(codes: Tensor, block: Tensor, ref: Tensor) -> Tensor:
    """`codes` of `block` where fills that are not the reference's own value become OTHER_FILL."""
    fills = codes >= POS_FILL
    return codes.masked_fill(fills & ~((block - ref).abs() <= FILL_AGREES * ref.abs()), OTHER_FILL)
