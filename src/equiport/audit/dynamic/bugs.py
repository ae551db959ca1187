"""Which bugs of the corpus fit a port's module: tried on copies of it, on the inputs that the test gives."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from equiport.audit.dynamic.structures import copied, distance, tensors
from equiport.audit.dynamic.watch import PortCall

#: Relative changes of an output that a test must notice: twice the fp32 gate on a slice, and four bf16 errors.
EFFECT, EFFECT_BF16 = 4e-3, 2e-2
#: Where a module could stand in a source model, by a word of its class; the corpus looks for paths.
_PLACES = (
    ("layernorm", "norm"), ("norm", "norm"), ("attention", "self_attn"), ("mlp", "mlp"), ("rotary", "rotary_emb"),
    ("embedding", "embed_tokens"), ("layer", "layer"), ("block", "mlp"),
)  # fmt: skip


@functools.cache
def operators() -> dict[str, Any]:
    """Every bug on live modules of the corpus, controls left out, by name."""
    from equiport.bench.portbugs import operators as package
    from equiport.bench.portbugs.operator import BugOperator

    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return {cls.name: cls() for cls in BugOperator.__subclasses__() if not cls.control}


@functools.cache
def text_bugs() -> dict[str, Callable[[str], str]]:
    """Every bug in the text of a port, controls left out, by name."""
    from equiport.bench.portbugs.operator import PortBug

    operators()
    return {cls.name: cls().edit for cls in PortBug.__subclasses__() if not cls.control}


def fitting_text_bugs(texts: list[str]) -> list[str]:
    """Bugs whose passage stands in one of the port's files."""
    from equiport.errors import EquiportError

    found = []
    for name, edit in text_bugs().items():
        for text in texts:
            try:
                changed = edit(text) != text
            except EquiportError:
                continue
            if changed:
                found.append(name)
                break
    return found


def holder(module: nn.Module) -> nn.Module:
    """A module around this one, in which it has a path as in a source model."""
    around = nn.Module()
    name = type(module).__name__.lower()
    place = next((place for word, place in _PLACES if word in name), "block")
    setattr(around, place, module)
    config = getattr(module, "config", None)
    around.config = config  # type: ignore[assignment]
    return around


def injector(name: str) -> Callable[[nn.Module], None]:
    """Put the bug of this name into a module of a port, as into a source model that consists of it alone."""
    bug = operators()[name]
    return lambda module: bug.inject(holder(module))


def fitting_bugs(call: PortCall, out: Any) -> dict[str, float]:
    """Bugs that change what this call gives by more than EFFECT, with the change; `out`: what it gives without."""
    floats = [item.dtype for item in tensors(out) if item.is_floating_point()]
    limit = EFFECT if floats and all(dtype is torch.float32 for dtype in floats) else EFFECT_BF16
    if call.owner is None or not list(call.owner.children()) + list(call.owner.parameters()):
        return {}
    found: dict[str, float] = {}
    random = torch.get_rng_state()
    for name in operators():
        kept = Kept(call.owner)
        try:
            injector(name)(call.owner)
            if kept.touched():
                with torch.no_grad():
                    effect = distance(call.run(*copied(call.args), **copied(call.kwargs)), out)
                if limit < effect < float("inf"):
                    found[name] = effect
        except Exception:  # does not fit this module
            continue
        finally:
            kept.put_back()
    torch.set_rng_state(random)
    return found


class Kept:
    """A module as it is, to be put back: parts may hold process groups, which cannot be copied."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [(item, self._shallow(item)) for item in module.modules()]
        self.values = [(item, item.data, item.data.clone()) for item in (*module.parameters(), *module.buffers())]

    @staticmethod
    def _shallow(module: nn.Module) -> dict[str, Any]:
        return {name: dict(item) if isinstance(item, dict) else item for name, item in module.__dict__.items()}

    def touched(self) -> bool:
        """Whether a forward was replaced or a value moved."""
        replaced = any("forward" in item.__dict__ and "forward" not in before for item, before in self.modules)
        return replaced or any(
            item.data_ptr() != data.data_ptr() or not _same(item.data, value) for item, data, value in self.values
        )

    def put_back(self) -> None:
        """Undo everything."""
        for item, before in self.modules:
            item.__dict__.clear()
            item.__dict__.update(before)
        for tensor, data, value in self.values:
            tensor.data = data
            tensor.data.copy_(value)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def chosen_bugs(found: dict[str, float], most: int) -> list[str]:
    """At most so many, of different kinds of cause first, the slight ones before the gross ones."""
    kinds: dict[str, str] = {}
    for name in sorted(found, key=lambda name: found[name]):
        cause = (operators()[name].causes or ("",))[0]
        kinds.setdefault(cause, name)
    first = sorted(kinds.values(), key=lambda name: found[name])
    rest = [name for name in sorted(found, key=lambda name: found[name]) if name not in first]
    return [*first, *rest][:most]
