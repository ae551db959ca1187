"""Baselines that split a reduction as a sharded target does.

A row-parallel layer of a port adds partial sums in bf16. A correct split by 4 has R 1.9 against an unsplit baseline, so
the reference in bf16 must be computed with the same split, and the comparison labelled `baseline="split:4"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from equiport.errors import EquiportError


def split_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, degree: int) -> Tensor:
    """`inputs @ weight.T + bias` as `degree` partial sums, each rounded to the tensors' dtype and then added in it.

    `inputs` [..., in], `weight` [out, in]. The ranks' parts are consecutive columns, added in rank order as an
    all-reduce of low-precision partial sums does; the bias is added once, after the sum.
    """
    total: Tensor | None = None
    for columns, rows in zip(inputs.tensor_split(degree, dim=-1), weight.tensor_split(degree, dim=1), strict=True):
        part = functional.linear(columns, rows)
        total = part if total is None else total + part
    if total is None:
        raise EquiportError(f"must be at least 1, got {degree}", field="degree")
    return total if bias is None else total + bias


def split_label(degree: int) -> str:
    """The label that a comparison against such a baseline declares: `split:K`, or `plain` for 1."""
    return f"split:{degree}" if degree > 1 else "plain"


@contextmanager
def split_reduction(module: nn.Module, degree: int, names: Iterable[str] | None = None) -> Iterator[tuple[str, ...]]:
    """Within the context, `nn.Linear`s (and Conv1Ds) of `module` compute their reduction in `degree` partial sums.

    `names`: dotted names below `module` ("" for itself, a last part such as "o_proj" for all layers' o_proj); default:
    every nn.Linear. Yields the names that were split. Forwards are restored on leaving, after an error too.

    Raises:
        EquiportError: no Linear of that name, or a reduction that `degree` does not divide.
    """
    if degree < 1:
        raise EquiportError(f"must be at least 1, got {degree}", field="degree")
    linears = {name: child for name, child in module.named_modules() if is_projection(child)}
    if names is None:
        chosen = tuple(linears)
    else:
        wanted = list(names)
        chosen = tuple(name for name in linears if name in wanted or (name and name.rsplit(".", 1)[-1] in wanted))
        found = {name for name in chosen} | {name.rsplit(".", 1)[-1] for name in chosen}
        for name in wanted:
            if name not in found:
                raise EquiportError(f"no nn.Linear named {name!r} in {type(module).__name__}", field="names")
    if not chosen:
        raise EquiportError(f"no nn.Linear to split in {type(module).__name__}", field="names")
    for name in chosen:
        if _weight(linears[name]).shape[1] % degree:
            raise EquiportError(
                f"in_features {_weight(linears[name]).shape[1]} is not divisible by {degree}", field=name or "module"
            )
    before = {name: linears[name].__dict__.get("forward") for name in chosen}
    try:
        for name in chosen:
            linears[name].__dict__["forward"] = partial(_forward, linears[name], degree)
        yield chosen
    finally:
        for name, forward in before.items():
            if forward is None:
                linears[name].__dict__.pop("forward", None)
            else:
                linears[name].__dict__["forward"] = forward


def is_projection(module: nn.Module) -> bool:
    """An nn.Linear, or GPT-2's Conv1D: the same product with its weight stored as [in, out]."""
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2
    )


def _weight(projection: nn.Module) -> Tensor:
    """[out, in]."""
    weight = projection.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(projection, nn.Linear) else weight.t()


def _forward(projection: nn.Module, degree: int, inputs: Tensor) -> Tensor:
    bias = projection.bias
    return split_linear(inputs, _weight(projection), bias if isinstance(bias, Tensor) else None, degree)


def split_matmul(left: Tensor, right: Tensor, degree: int) -> Tensor:
    """`left @ right` ([..., m, k] by [k, n]) as `degree` partial sums in the tensors' dtype."""
    return split_linear(left, torch.transpose(right, 0, 1), None, degree)
