"""What a compiled graph remembers from one call to the next: the tensors aliased to its outputs, and nothing else.

On a device each stage is traced once. A tensor survives a call only where the wrapper's model instance aliases it to an
output (`DecoderModelInstance.get`: the KV caches; a port's own instance may alias more). In CPU mode Python keeps what
a forward writes into attributes and buffers, and the stack has no place for outputs beyond the caches. Here both are as
on the device: such writes are undone after each call, and outputs that the port's instance aliases are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError

from .old_names import note, notes_of

_FOREIGN = ("torch", "transformers", "neuronx_distributed")
_SHOWN = 2


@dataclass
class _Held:
    """What a module of the port had before a call, by attribute name."""

    module: nn.Module
    path: str
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """name -> (the object itself, a copy of its contents)."""


def remember_as_compiled(inner: nn.Module, wrapper: Any) -> None:
    """Give `inner` the memory of its compiled graph. `wrapper`: one of its model wrappers, or None.

    What was undone or carried is told by `memory_notes`. Idempotent.
    """
    if getattr(inner, "_equiport_memory", False):
        return
    inner._equiport_memory = True  # type: ignore[assignment]
    aliased = _aliases(inner, wrapper)
    kept: list[_Held] = []

    def before(_: nn.Module, __: tuple[Any, ...]) -> None:
        kept[:] = list(_held(inner, {id(tensor) for tensor in aliased}))

    def after(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        lost = [f"{held.path}.{name}" for held in kept for name in _undone(held)]
        kept.clear()
        if lost:
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            note(
                inner,
                f"{', '.join(lost[:_SHOWN])}{more}: written in the forward and no output that is aliased: a compiled "
                "graph drops it after each call, and so it is dropped here",
            )
        return _carried(inner, aliased, outputs) if aliased else outputs

    inner.register_forward_pre_hook(before)
    inner.register_forward_hook(after)


def memory_notes(inner: nn.Module) -> tuple[str, ...]:
    """What calls so far have shown."""
    return notes_of(inner)


def _aliases(inner: nn.Module, wrapper: Any) -> Mapping[Tensor, int]:
    """Tensors beyond the KV caches that the port's own model instance aliases, with their place among the outputs.

    Raises:
        EquiportError: the port has a model instance of its own that does not say.
    """
    make = getattr(type(wrapper), "get_model_instance", None)
    if make is None or make.__module__.startswith(_FOREIGN):
        return {}
    try:
        instance = wrapper.get_model_instance()
        instance.module = inner
        found: Mapping[Tensor, int] = instance.get(None)[1]
    except Exception as fault:
        raise EquiportError(
            f"decode is not validated on a CPU: {make.__qualname__} makes a model instance of the port's own, which "
            f"does not tell its aliases ({type(fault).__name__}: {fault})",
            where=make.__code__.co_filename,
            remedy="Let its get(None) give the module and the map from tensors to outputs.",
        ) from fault
    caches = {id(tensor) for tensor in inner.kv_mgr.past_key_values}  # type: ignore[union-attr]
    return {tensor: place for tensor, place in found.items() if id(tensor) not in caches}


def _carried(inner: nn.Module, aliased: Mapping[Tensor, int], outputs: Any) -> Any:
    """The outputs without those that the aliases have taken."""
    if not isinstance(outputs, (list, tuple)) or max(aliased.values()) >= len(outputs):
        raise EquiportError(
            f"the port aliases output {max(aliased.values())}, and gives {len(outputs)}",
            remedy="Give one output for each alias of its model instance.",
        )
    names = {id(tensor): name for name, tensor in (*inner.named_parameters(), *inner.named_buffers())}
    for tensor, place in aliased.items():
        if outputs[place].shape != tensor.shape:
            raise EquiportError(
                f"output {place} has the shape {list(outputs[place].shape)}, its alias {list(tensor.shape)}",
                remedy="Return states in the shape of their buffers.",
            )
        tensor.data = outputs[place].detach().to(tensor.dtype)
    first = names.get(id(next(iter(aliased))), "a state")
    note(
        inner,
        f"{len(aliased)} states beyond the caches, first {first}, are carried from call to call by the port's own "
        "aliases, as on a device",
    )
    taken = set(aliased.values())
    return [value for place, value in enumerate(outputs) if place not in taken]


def _held(inner: nn.Module, aliased: set[int]) -> Iterator[_Held]:
    """Plain attributes, buffers and parameters of the port's own modules; most weights are in modules of the stack."""
    for path, module in inner.named_modules():
        if type(module).__module__.startswith(_FOREIGN) or path.partition(".")[0] == "kv_mgr":
            continue
        held = _Held(module, path or type(module).__name__)
        own = [item for item in (*vars(module).items(), *module._buffers.items()) if _is_state(*item)]
        for name, value in (*own, *module._parameters.items()):
            if id(value) not in aliased:
                held.values[name] = (value, _copied(value))
        yield held


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training":
        return False
    return value is None or isinstance(value, (Tensor, list, dict)) and not isinstance(value, nn.Parameter)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (list, dict)) else value


def _undone(held: _Held) -> Iterator[str]:
    """Put back what the call has changed; the names."""
    own = vars(held.module)
    for name, (value, copy) in held.values.items():
        place = next((at for at in (held.module._buffers, held.module._parameters) if name in at), own)
        if place.get(name) is not value:
            place[name] = value
            yield name
        if isinstance(value, Tensor):
            if not _same(value, copy):
                value.data = copy
                yield name
        elif isinstance(value, (list, dict)) and not _same_contents(value, copy):
            value.clear()
            value.extend(copy) if isinstance(value, list) else value.update(copy)
            yield name
    for name in [key for key, value in own.items() if key not in held.values and _is_new(key, value)]:
        del own[name]
        yield name


def _is_new(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not name.startswith("_") and not isinstance(value, nn.Parameter)


def _same(value: Tensor, copy: Tensor) -> bool:
    return value.shape == copy.shape and bool(torch.equal(value.nan_to_num(), copy.nan_to_num()))


def _same_contents(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    pairs = zip(value, copy) if isinstance(value, list) else ((value[key], copy.get(key)) for key in value)  # noqa: B905
    return all(one is other for one, other in pairs)
