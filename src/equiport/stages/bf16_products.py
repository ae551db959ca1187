"""bf16 matrix products on a CPU without bf16 instructions: multiplied and summed in fp32, then rounded to bf16.

That is what torch's own CPU kernels compute, apart from the order of the sum; they take several times as long there.
Both sides of a comparison run alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class _Rounded(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and all(tensor.dtype is torch.bfloat16 for tensor in args):
            return func(*[tensor.float() for tensor in args], **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 by itself."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


@contextmanager
def fast_bf16_products() -> Iterator[None]:
    """Inside, bf16 products go through fp32 where the CPU has no bf16 instructions; elsewhere nothing changes."""
    with nullcontext() if native_bf16() else _Rounded():
        yield
