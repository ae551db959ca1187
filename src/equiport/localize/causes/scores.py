"""Scores of an attention that takes q k^T in fp32, taken in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate
from equiport.localize.surgery import Surgery

_PRODUCTS = ("matmul", "__matmul__", "bmm")


def low_scores(case: Case) -> Iterable[Candidate]:
    """One an attention of the bf16 source whose softmax is over a product of two fp32 tensors."""
    for path in _in_fp32(case):
        yield Candidate(
            f"the scores (q k^T) of {path} are taken in bf16, the source takes them in fp32", _lowered(path),
            "cast q and k to fp32 before their product, and back after the softmax",
        )  # fmt: skip


class _Scores(TorchFunctionMode):
    """The products of fp32 tensors before the first softmax of a call; with `low` in bf16, as what follows then is.

    `seen` is called at the softmax, if there were any.
    """

    def __init__(self, seen: Callable[[], None], low: bool) -> None:
        super().__init__()
        self._seen, self._low = seen, low
        self._any = self._over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "softmax" and not self._over:
            self._over = True
            if self._any:
                self._seen()
        if name in _PRODUCTS and not self._over and len(args) == 2 and all(_is_wide(value) for value in args):
            self._any = True
            if self._low:
                args = (args[0].bfloat16(), args[1].bfloat16())
        return func(*args, **(kwargs or {}))


def _is_wide(value: object) -> bool:
    """An fp32 operand [..., T, D]; outer products, as of positions with frequencies, have none."""
    return isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim() > 2 and 1 not in value.shape[-2:]


def _within(case: Case, surgery: Surgery, path: str, seen: Callable[[], None], low: bool) -> None:
    attention = case.model.get_submodule(path)
    original = attention.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Scores(seen, low):
            return original(*args, **kwargs)

    surgery.forward(attention, run)


def _in_fp32(case: Case) -> list[str]:
    """The attentions with such a product, found by running the source as it is."""
    found: list[str] = []
    paths = [path for path, _ in case.sites(Part.ATTENTION)]
    if not paths or next(case.model.parameters()).dtype is not torch.bfloat16:
        return found
    with Surgery() as surgery:
        for path in paths:
            _within(case, surgery, path, lambda path=path: found.append(path), low=False)  # type: ignore[misc]
        case.outputs()
    return list(dict.fromkeys(found))


def _lowered(path: str) -> Callable[[Case, Surgery], None]:
    return lambda at, surgery: _within(at, surgery, path, lambda: None, low=True)
