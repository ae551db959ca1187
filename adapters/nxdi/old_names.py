"""Symbols of the stack whose signature has changed, given to ports in the form that they were written for.

Only where the old form is unmistakable (a call that the present one refuses), and where both compute the same. What is
given is noted in the load report.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

NOTES = "_equiport_notes"
_RMSNORM = "get_rmsnorm_cls"


def adapt_old_names(module: ModuleType) -> None:
    """Replace names of an imported port in place; `notes_of` tells what was done. Idempotent."""
    getter = getattr(module, _RMSNORM, None)
    from_stack = getattr(getter, "__module__", "").startswith("neuronx_distributed")
    if not from_stack or not callable(getter) or hasattr(getter, "_equiport_old") or not _called_bare(module, _RMSNORM):
        return
    first = next(iter(inspect.signature(getter).parameters), "")
    if first != "hidden_size":
        return  # this release still gives the class
    setattr(module, _RMSNORM, _gives_class(getter))
    note(module, f"{_RMSNORM}() is called as in releases where it gives the class; here it takes the size: adapted")


def note(holder: Any, text: str) -> None:
    """Add a note to a port's module or model, once."""
    kept = getattr(holder, NOTES, ())
    if text not in kept:
        setattr(holder, NOTES, (*kept, text))


def notes_of(holder: Any) -> tuple[str, ...]:
    """The notes of a port's module or model."""
    return tuple(getattr(holder, NOTES, ()))


def _gives_class(getter: Callable[..., Any]) -> Callable[..., Any]:
    """Without arguments a maker that asks the stack itself for the norm; with arguments the stack's own."""

    @functools.wraps(getter)
    def old(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return getter(*args, **kwargs)
        return lambda hidden_size, eps=1e-6, **more: getter(hidden_size, eps=eps, **more)

    old._equiport_old = True  # type: ignore[attr-defined]
    return old


def _called_bare(module: ModuleType, name: str) -> bool:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError):
        return False
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and not node.args
        and not node.keywords
        for node in ast.walk(tree)
    )
