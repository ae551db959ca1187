"""Reversible edits of a live source model: parameters, attributes, inputs and outputs, rotation, attention core."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from equiport.trace.module_io import find_hidden


@dataclass(frozen=True)
class RotaryCall:
    """What `apply_rotary_pos_emb` gets: q, k [B, heads, T, D]; cos, sin [B or 1, T, rotary_dim]."""

    query: Tensor
    key: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class CoreCall:
    """What the eager attention gets: q [B, H, T, D], k and v [B, KV, T, D], additive mask [B, 1, T, T] or None."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    def with_option(self, name: str, value: Any) -> CoreCall:
        """The call with one keyword (scaling, softcap, ...) changed."""
        return replace(self, options={**self.options, name: value})


RotaryEdit = Callable[[RotaryCall, Callable[[RotaryCall], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]
CoreEdit = Callable[[CoreCall], CoreCall]

_CORE = "eager_attention_forward"
# the second is that of latent attention
_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


class Surgery:
    """Edits that end with the `with` block, whatever happens in it."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> Surgery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def entered(self, context: AbstractContextManager[object]) -> None:
        """Enter a context that is left when the surgery ends."""
        self._undo.enter_context(context)

    def parameter(self, module: nn.Module, name: str, value: Tensor | None) -> None:
        """Replace a parameter or buffer; None removes it (a bias)."""
        kept = getattr(module, name)
        if name in module._buffers:
            module._buffers[name] = value
            self._undo.callback(module._buffers.__setitem__, name, kept)
            return
        module._parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)
        self._undo.callback(module._parameters.__setitem__, name, kept)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set a plain attribute."""
        own = vars(owner)
        if name in own:
            self._undo.callback(setattr, owner, name, own[name])
        else:
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Replace a module's forward; hooks still run."""
        self.attribute(module, "forward", function)

    def output(self, module: nn.Module, edit: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Replace the first output tensor by `edit(hidden_input, output)`."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            site = find_hidden(args, kwargs)
            hidden = site.read(args, kwargs) if site else torch.empty(0)
            if isinstance(getattr(out, "logits", None), Tensor):
                out.logits = edit(hidden, out.logits)
                return out
            if isinstance(out, tuple):
                return (edit(hidden, out[0]), *out[1:])
            return edit(hidden, out)

        # first of all hooks, so that what records the output sees the edited one
        handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
        self._undo.callback(handle.remove)

    def given(self, module: nn.Module, edit: Callable[[Tensor], Tensor]) -> None:
        """Replace the hidden input by `edit(hidden_input)` before any other hook sees it."""

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            site = find_hidden(args, kwargs)
            return None if site is None else site.replaced(args, kwargs, edit(site.read(args, kwargs)))

        handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        self._undo.callback(handle.remove)

    def input(self, module: nn.Module, edit: Callable[[Tensor], Tensor]) -> None:
        """Replace the hidden input by `edit(hidden_input)`, after whatever hooks feed to the module."""
        original = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            site = find_hidden(args, kwargs)
            if site is None:
                return original(*args, **kwargs)
            args, kwargs = site.replaced(args, kwargs, edit(site.read(args, kwargs)))
            return original(*args, **kwargs)

        self.forward(module, run)

    def rotation(self, attention: nn.Module, edit: RotaryEdit) -> None:
        """Edit the rotation of q and k inside one attention module."""
        source = _python_module(attention)
        inside = [False]

        def before(*_: Any) -> None:
            inside[0] = True

        def after(*_: Any) -> None:
            inside[0] = False

        for handle in (
            attention.register_forward_pre_hook(before),
            attention.register_forward_hook(after, always_call=True),
        ):
            self._undo.callback(handle.remove)
        for name in _ROTATIONS:
            if hasattr(source, name):
                self.attribute(source, name, _rotated(getattr(source, name), edit, inside))

    def core(self, attention: nn.Module, edit: CoreEdit) -> None:
        """Edit what one attention module hands to its softmax(QK)V."""
        source = _python_module(attention)
        original = getattr(source, _CORE)

        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
            if module is not attention:
                return original(module, q, k, v, mask, **options)
            call = edit(CoreCall(module, q, k, v, mask, options))
            return original(call.module, call.query, call.key, call.value, call.mask, **call.options)

        self.attribute(source, _CORE, attend)


def _rotated(original: Callable[..., Any], edit: RotaryEdit, inside: list[bool]) -> Callable[..., Any]:
    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        def plain(call: RotaryCall) -> tuple[Tensor, Tensor]:
            return original(call.query, call.key, call.cos, call.sin, *args, **kwargs)  # type: ignore[no-any-return]

        call = RotaryCall(q, k, cos, sin)
        return edit(call, plain) if inside[0] else plain(call)

    return rotated


def has_rotation(attention: nn.Module) -> bool:
    """Whether the module's file rotates q and k by the usual function."""
    return any(hasattr(_python_module(attention), name) for name in _ROTATIONS)


def has_core(attention: nn.Module) -> bool:
    """Whether the module's file has the usual eager attention."""
    return hasattr(_python_module(attention), _CORE)


def _python_module(module: nn.Module) -> ModuleType:
    return sys.modules[type(module).__module__]
