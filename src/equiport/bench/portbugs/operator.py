"""A bug of the corpus: what it does to a source model, on which family, where it sits, what its cause is called."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError


class Defect:
    """What the corpus knows of a bug; `family` is a key of the corpus's configs.

    `component`: a part of the name of the component that holds the bug; several may be right, since a bug at a border
    is seen on either side. `causes`: the kinds of root cause that name it rightly. `control`: a correct rewrite, which
    must pass every gate; `split` are the projections whose reduction it splits in two, to be declared in the mapping.
    `quick`: part of the handful that CI runs.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    component: ClassVar[tuple[str, ...]] = ()
    causes: ClassVar[tuple[str, ...]] = ()
    control: ClassVar[bool] = False
    split: ClassVar[tuple[str, ...]] = ()
    quick: ClassVar[bool] = False


class PortBug(Defect, ABC):
    """A bug in the text of a port that the recipes generate. Subclass it in `operators/`, one class a kind."""

    @abstractmethod
    def edit(self, source: str) -> str:
        """The port's text with the bug in it."""


def replaced(source: str, old: str, new: str) -> str:
    """`source` with `old` replaced wherever it stands.

    Raises:
        EquiportError: it stands nowhere, so the corpus no longer fits the recipes.
    """
    if old not in source:
        raise EquiportError(f"the port holds no {old!r}", field="portbugs", remedy="Fit the operator to the recipe.")
    return source.replace(old, new)


class BugOperator(Defect, ABC):
    """A bug in a live source model. Subclass it in `operators/`, one class a kind."""

    @abstractmethod
    def inject(self, model: nn.Module) -> None:
        """Put the bug into a live source model of the family; nothing outside this model may change."""


@dataclass(frozen=True)
class Named:
    """A module of a source model with its path."""

    path: str
    module: Any


def modules(model: nn.Module, *endings: str) -> Iterator[Named]:
    """Modules whose path ends with one of these, in forward order."""
    for path, module in model.named_modules():
        if path.endswith(endings):
            yield Named(path, module)


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args, **kwargs)` run in place of the module's forward."""
    original = module.forward
    module.forward = lambda *args, **kwargs: wrapper(original, *args, **kwargs)  # type: ignore[method-assign]


def scale_output(module: nn.Module, factor: float) -> None:
    """Multiply the module's first output."""
    edit_output(module, lambda out: out * factor)


def edit_output(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> None:
    """Edit the module's first output tensor."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

    wrap_forward(module, wrapper)


def while_running(module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    """While the module's forward runs, `name` of its own Python file is `replacement(original, *args, **kwargs)`.

    The file serves other models too, the reference among them: so it is put back when the forward ends.
    """
    file = sys.modules[type(module).__module__]

    def wrapper(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        original = getattr(file, name)

        def replaced(*inner: Any, **options: Any) -> Any:
            return replacement(original, *inner, **options)

        setattr(file, name, replaced)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(file, name, original)

    wrap_forward(module, wrapper)


Core = Callable[..., Any]


def attentions(model: nn.Module) -> list[Any]:
    """The attention of every layer."""
    return [found.module for found in modules(model, "self_attn", ".attention")]


def rotate(
    attention: nn.Module, turned: Callable[..., tuple[Tensor, Tensor]], name: str = "apply_rotary_pos_emb"
) -> None:
    """Let `turned(original, q, k, cos, sin)` stand for the rotation inside one attention."""
    while_running(attention, name, lambda original, q, k, cos, sin, *a, **kw: turned(original, q, k, cos, sin))


def attend(attention: nn.Module, core: Core) -> None:
    """Let `core(original, module, q, k, v, mask, **options)` stand for the eager softmax(QK)V inside one attention."""
    while_running(attention, "eager_attention_forward", core)


def scored(attention: nn.Module, scale: float) -> None:
    """Scale the scores by another number."""
    attend(attention, lambda original, *args, **options: original(*args, **{**options, "scaling": scale}))


def decoding(query: Tensor, key: Tensor) -> bool:
    """Whether the core works on one new token behind cached ones: q [B, H, 1, D], k [B, KV, K, D]."""
    return query.shape[-2] == 1 and key.shape[-2] > 1


def forget(attention: nn.Module, slots: Callable[[int], Sequence[int]]) -> None:
    """In decode, hide the key slots that `slots(number of keys)` names; negative ones count from the end."""

    def core(original: Core, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        if decoding(q, k):
            count = k.shape[-2]
            hidden = [slot for slot in slots(count) if -count < slot < count]
            mask = torch.zeros(q.shape[0], 1, 1, count, dtype=q.dtype) if mask is None else mask.clone()
            mask[..., hidden] = torch.finfo(q.dtype).min
        return original(module, q, k, v, mask, **options)

    attend(attention, core)


def masked(attention: nn.Module, hidden: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In prefill, replace the mask: `hidden(query positions [T, 1], key positions [1, T])` are hidden."""

    def core(original: Core, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        if not decoding(q, k):
            size = q.shape[-2]
            away = hidden(torch.arange(size)[:, None], torch.arange(size)[None])
            mask = torch.zeros(1, 1, size, size, dtype=q.dtype).masked_fill(away, torch.finfo(q.dtype).min)
        return original(module, q, k, v, mask, **options)

    attend(attention, core)
