"""Decode keeps nothing of the tokens before: a mixer sees each new token as if it were the first and only one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part, part_of
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery
from equiport.trace.module_io import find_hidden

# modules of one token at a time: no state to lose
_POINTWISE = {Part.LINEAR, Part.NORM, Part.EMBEDDING, Part.ROTARY, Part.MLP, Part.EXPERTS, Part.ROUTER, Part.MOE}


class AloneInDecode(Hypothesis):
    """No state and no cache reaches decode: its tokens are mixed with none of the sequence."""

    kind = "state not carried in decode"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each mixer of the suspect (attention, state space, convolution, linear recurrence); all of them."""
        if case.is_entry or case.observations[0].places is None:
            return
        found = [path for source in case.sources for path in mixers(case.model, source)]
        choices: list[tuple[str, ...]] = [(path,) for path in found]
        if len(found) > 1:
            choices.append(tuple(found))
        for paths in choices:

            def edit(at: Case, surgery: Surgery, paths: tuple[str, ...] = paths) -> None:
                late = torch.arange(at.batch.padded().shape[1])[None] >= torch.tensor(at.batch.prompt_lengths)[:, None]
                for path in paths:
                    _alone(at.model.get_submodule(path), late, surgery)

            yield Candidate(
                f"decode keeps no state of {' and '.join(paths)}: each new token is computed as if it were alone",
                edit,
                "carry the state (last inputs of the convolution, recurrent state, keys and values) from step to step, "
                "in tensors that the model returns and the stack aliases to its inputs",
            )


def mixers(model: nn.Module, path: str) -> Iterator[str]:
    """Paths of the outermost modules, at or inside `path`, that mix tokens: attention, or around a convolution or a
    recurrence of their own."""
    module = model.get_submodule(path)
    part = part_of(module)
    if part in _POINTWISE or isinstance(module, nn.Conv1d):
        return
    if part is Part.ATTENTION or part is not Part.LAYER and _is_recurrent(module):
        yield path
        return
    for name, _ in module.named_children():
        yield from mixers(model, f"{path}.{name}".strip("."))


def _is_recurrent(module: nn.Module) -> bool:
    """A convolution over tokens among its children, or weights of its own beside them that are more than a scale."""
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        return True
    return sum(1 for _ in module.named_parameters(recurse=False)) > 1


def _alone(module: nn.Module, late: Tensor, surgery: Surgery) -> None:
    """The module's output at the `late` [B, T] tokens becomes what it gives for each of them alone."""
    original = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        site = find_hidden(args, kwargs)
        hidden = None if site is None else site.read(args, kwargs)
        if hidden is None or hidden.shape[:2] != late.shape:
            raise ValueError("takes no hidden tensor [B, T, ...]")
        rows, width = late.shape
        whole = original(*args, **kwargs)
        single_args = tuple(_single(value, rows, width) for value in args)
        single_kwargs = {name: _single(value, rows, width) for name, value in kwargs.items()}
        with _forgotten(module):
            each = original(*single_args, **single_kwargs)
        first, single = (out[0] if isinstance(out, tuple) else out for out in (whole, each))
        chosen = late.reshape(rows, width, *[1] * (first.dim() - 2))
        mixed = torch.where(chosen, single.reshape(first.shape), first)
        return (mixed, *whole[1:]) if isinstance(whole, tuple) else mixed

    surgery.forward(module, run)


def _single(value: Any, rows: int, width: int) -> Any:
    """An argument as it is for one token alone, of every place: [B, T, ...] becomes [B * T, 1, ...]; masks and caches
    become None."""
    if isinstance(value, tuple):
        return tuple(_single(item, rows, width) for item in value)
    if isinstance(value, Tensor):
        if value.dim() == 4 and value.shape[-2:] == (width, width):
            return None
        if value.dim() == 1 and value.shape[0] == width:
            return value[:1]
        if value.dim() >= 2 and value.shape[1] == width and value.shape[0] in (1, rows):
            return value.expand(rows, *value.shape[1:]).flatten(0, 1).unsqueeze(1)
        return value
    return value if value is None or isinstance(value, (bool, int, float, str)) else None


@contextmanager
def _forgotten(module: nn.Module) -> Iterator[None]:
    """Without what a source keeps between calls in plain attributes; it is put back."""
    held = [
        (inner, name, value)
        for inner in module.modules()
        for name, value in vars(inner).items()
        if isinstance(value, Tensor) and "state" in name
    ]
    for inner, name, _ in held:
        setattr(inner, name, None)
    try:
        yield
    finally:
        for inner, name, value in held:
            setattr(inner, name, value)
