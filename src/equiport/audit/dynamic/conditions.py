"""Conditions that the author of a test did not choose: other seeds, other shapes, memory full of NaN."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equiport.audit.dynamic.structures import replaced, tensors
from equiport.audit.dynamic.watch import Watch

_OFFSETS = {"seed-1": 7919, "seed-2": 104_729, "seed-3": 1_299_709}
_SHORTER = 5


def apply_condition(name: str, watch: Watch) -> Callable[[], bool]:
    """Put a condition in force in this process; returns a function that says whether it changed anything."""
    if name == "poison":
        return _poison()
    if name in _OFFSETS:
        return _reseed(_OFFSETS[name])
    if name == "shape-batch":
        return _reshape(_with_another_row, watch)
    if name == "shape-length":
        return _reshape(_shorter, watch)
    raise ValueError(name)


def _poison() -> Callable[[], bool]:
    """Every allocation that promises nothing holds NaN."""
    import numpy

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            found = make(*args, **kwargs)
            if found.dtype.kind == "f":
                found.fill(numpy.nan)
            return found

        return made

    for name in ("empty", "empty_like"):
        setattr(numpy, name, poisoned(getattr(numpy, name)))
    return lambda: True


def _reseed(offset: int) -> Callable[[], bool]:
    """Every seed that is set is another one than was asked for."""
    import random

    import numpy

    used = []
    original, generator = torch.manual_seed, torch.Generator

    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        used.append(seed)
        return original(int(seed) + offset)

    class Shifted(generator):  # type: ignore[misc,valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            used.append(seed)
            return super().manual_seed(int(seed) + offset)  # type: ignore[no-any-return]

    torch.manual_seed, torch.Generator = manual_seed, Shifted  # type: ignore[misc]
    torch.random.manual_seed = manual_seed
    seed_python, seed_numpy, rng_numpy = random.seed, numpy.random.seed, numpy.random.default_rng

    def moved(seed: Any = None) -> Any:
        return (seed + offset) % 2**32 if isinstance(seed, int) else seed

    random.seed = lambda a=None, version=2: seed_python(moved(a), version)  # type: ignore[assignment]
    numpy.random.seed = lambda seed=None: seed_numpy(moved(seed))  # type: ignore[assignment]
    numpy.random.default_rng = lambda seed=None: rng_numpy(moved(seed))  # type: ignore[assignment]
    original(offset)
    return lambda: bool(used)


def _reshape(change: Callable[[Any, Any], tuple[Any, Any] | None], watch: Watch) -> Callable[[], bool]:
    """Inputs of block tests have other shapes, on both sides alike."""
    from equiport.port import translate_block_test

    judge, changed = inspect.unwrap(translate_block_test.test_block_correctness), []

    def block_test(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("test_inputs") or kwargs.get("example_inputs")
        if not given:
            changed.append(True)
            return judge(*args, **{**kwargs, "batch_size": 3, "seq_len": 17})
        pairs = [
            change(target, source)
            for target, source in zip(given, kwargs.get("reference_inputs") or given, strict=False)
        ]
        if any(pair is None for pair in pairs):
            return judge(*args, **kwargs)
        changed.append(True)
        both = [pair for pair in pairs if pair is not None]
        return judge(
            *args, **{**kwargs, "test_inputs": [one for one, _ in both], "reference_inputs": [two for _, two in both]}
        )

    watch.block_test = block_test
    return lambda: bool(changed)


def _asked(value: Any) -> Any:
    return value(torch.float32) if callable(value) and not isinstance(value, Tensor) else value


def _by_dtype(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with its tensors changed; a function of the dtype stays one."""
    if callable(value) and not isinstance(value, Tensor):
        return lambda dtype: replaced(value(dtype), change)
    return replaced(value, change)


def _sizes(target: Any, source: Any) -> tuple[int, int] | None:
    """Rows and length of the first tensor of at least two dimensions; None where a size may mean several things."""
    first = next((item for item in tensors(_asked(target)) if item.dim() >= 2), None)
    if first is None:
        return None
    rows, length = int(first.shape[0]), int(first.shape[1])
    everything = [*tensors(_asked(target)), *tensors(_asked(source))]
    widths = {int(item.shape[-1]) for item in everything if item.dim() >= 3 and item.shape[-1] != length}
    return None if rows == length or length in widths or rows in widths or rows < 2 else (rows, length)


def _with_another_row(target: Any, source: Any) -> tuple[Any, Any] | None:
    sizes = _sizes(target, source)
    if sizes is None:
        return None

    def grow(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor[:1])) if tensor.dim() >= 2 and tensor.shape[0] == sizes[0] else tensor

    return _by_dtype(target, grow), _by_dtype(source, grow)


def _shorter(target: Any, source: Any) -> tuple[Any, Any] | None:
    sizes = _sizes(target, source)
    if sizes is None or sizes[1] <= _SHORTER + 1:
        return None

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if dim > 0 and size == sizes[1]:
                tensor = tensor.narrow(dim, 0, size - _SHORTER)
        return tensor

    return _by_dtype(target, cut), _by_dtype(source, cut)
