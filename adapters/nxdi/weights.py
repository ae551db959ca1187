"""Loads weights through the port's own conversion, and counts what did not arrive.

The stack loads with strict=False and drops what the model does not know: a key that was forgotten leaves random
weights, a bias that the port has no place for vanishes, without a word. Both are seen here.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equiport.errors import EquiportError
from equiport.stacks.checkpoint import checkpoint_keys
from equiport.stacks.contract import LoadReport

from .conversion import Supply, explained, next_supply, supplied
from .graph_memory import remember_as_compiled
from .old_names import note, notes_of
from .port_config import hf_value

# Filled by the stack itself, or recomputed: absent from every checkpoint.
BENIGN_MISSING = re.compile(r"(^|\.)(kv_mgr\.|rank_util\.rank$|past_key_values|global_rank\.|rotary_emb\.\w*inv_freq$)")
# Written by ports for layers that do not use them at this TP degree, or a constant of old HuggingFace checkpoints.
BENIGN_UNEXPECTED = re.compile(r"(^|\.)(rank_util\.rank|rotary_emb\.inv_freq)$")
_LOADING = ("checkpoint_loader_fn", "get_state_dict", "get_sharded_checkpoint", "load_state_dict")
# The words of the real stack, and of the stand-in.
_SHAPE_FAULT = re.compile(r"expected shape .* for (?P<a>\S+) but found|^(?P<b>\S+) has the shape ")


@dataclass
class _Counted:
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)
    """Keys of one number without a dimension: what a port may have as a constant in its code."""

    def report(self) -> LoadReport:
        benign = [key for key in self.missing if BENIGN_MISSING.search(key)]
        benign += [key for key in self.unexpected if BENIGN_UNEXPECTED.search(key) or key in self.numbers]
        left = set(benign)
        return LoadReport(
            loaded=tuple(sorted(set(self.loaded))),
            missing=tuple(sorted(key for key in set(self.missing) if key not in left)),
            unexpected=tuple(sorted(key for key in set(self.unexpected) if key not in left)),
            mis_shaped=tuple(sorted(set(self.mis_shaped))),
            benign=tuple(sorted(left)),
            notes=tuple(
                f"the number {key} is stored with the weights and not taken by the port, which has it in its code"
                for key in sorted(self.numbers & set(self.unexpected))
            ),
        )


def load_causal(model: Any, folder: Path) -> LoadReport:
    """Weights of a causal-LM application, by its own `to_cpu()`."""
    checkpoint_keys(folder)
    model.config._name_or_path = model.model_path = str(folder)

    def attempt(supply: Supply) -> LoadReport:
        while True:
            try:
                with _counting(model._model_cls) as counted, supplied(type(model), supply):
                    _translated(lambda: model.to_cpu(), counted, folder)
            except EquiportError as fault:
                if not _supplied(model, fault.__cause__, folder):
                    raise
                continue
            return _noted(counted.report(), model)

    report = _by_any_route(attempt, type(model), folder)
    for wrapper in model.models:
        if wrapper.model is not None:
            remember_as_compiled(wrapper.model, wrapper)
    return report


def _by_any_route(attempt: Callable[[Supply], LoadReport], causal_class: Any, folder: Path) -> LoadReport:
    """The first attempt that loads; the report tells what it had to be given.

    Raises:
        EquiportError: none loads: the first fault, with the names that the port reads, where they are known.
    """
    supply, first = Supply(), None
    while True:
        try:
            report = attempt(supply)
        except EquiportError as fault:
            first = first or fault
            better = next_supply(fault.__cause__, supply, causal_class, folder)
            if better is None:
                break
            supply = better
        else:
            return replace(report, notes=(*report.notes, *supply.notes), faults=supply.faults)

    def failure(other: Supply) -> BaseException | None:
        try:
            attempt(other)
        except EquiportError as fault:
            return fault.__cause__ or fault
        return None

    raise explained(first, causal_class, folder, failure) from first.__cause__


def _supplied(model: Any, fault: BaseException | None, folder: Path) -> bool:
    """Whether an attribute that the port's config lacks could be given, as the stack's own loader would have.

    Only one on which the port stops: where it has a default of its own for an absent attribute, that stands.
    """
    named = re.fullmatch(r"'(\w+)' object has no attribute '(\w+)'", str(fault))
    if not isinstance(fault, AttributeError) or named is None or named[1] != type(model.config).__name__:
        return False
    there, value = hf_value(folder, named[2])
    configs = [model.config, *(wrapper.config for wrapper in getattr(model, "models", []))]
    if not there or hasattr(model.config, named[2]):
        return False
    for config in configs:
        setattr(config, named[2], value)
    said = f"{named[1]} lacks {named[2]}: taken from the HuggingFace config ({value!r}), as load_pretrained_config does"
    note(model, said)
    return True


def _noted(report: LoadReport, model: Any) -> LoadReport:
    """With what was adapted for this port, in its module, its NeuronConfig and its config."""
    module = sys.modules.get(getattr(model, "_equiport_port", ""))
    adapted = (*notes_of(module), *notes_of(model.config.neuron_config), *notes_of(model))
    return replace(report, notes=(*report.notes, *adapted))


def load_inner(inner: nn.Module, causal_class: Any, folder: Path) -> LoadReport:
    """Weights of a bare inner model, through the conversion of the causal class that wraps it in the port."""
    checkpoint_keys(folder)
    from neuronx_distributed.trace.trace import get_sharded_checkpoint

    config: Any = inner.config
    dtype = config.neuron_config.torch_dtype

    def load() -> None:
        state_dict = causal_class.get_state_dict(str(folder), config)
        for key, value in state_dict.items():
            if torch.is_floating_point(value) and value.dtype is not torch.float8_e4m3fn and not key.endswith("scale"):
                state_dict[key] = value.to(dtype)
        get_sharded_checkpoint(state_dict, inner, torch.distributed.get_rank(), config.neuron_config.tp_degree)
        inner.load_state_dict(state_dict, strict=False)

    def attempt(supply: Supply) -> LoadReport:
        with _counting(type(inner)) as counted, supplied(causal_class, supply):
            _translated(load, counted, folder)
        return _noted(counted.report(), inner)

    report = _by_any_route(attempt, causal_class, folder)
    inner.eval()
    remember_as_compiled(inner, None)
    return report


def _translated(load: Any, counted: _Counted, folder: Path) -> None:
    # the stack logs a line for every key that its hooks copy
    root, repeated = logging.getLogger(), lambda record: "Found shared tensors" not in str(record.msg)
    root.addFilter(repeated)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
    except EquiportError:
        raise
    except RuntimeError as fault:
        shape = _SHAPE_FAULT.search(str(fault))
        if shape is None:
            raise _failure(fault, folder) from fault
        counted.mis_shaped.append(shape["a"] or shape["b"])
    except NotImplementedError as fault:
        raise EquiportError(str(fault), field="dtype", remedy="Use float32, or tp_degree 1.") from fault
    except Exception as fault:
        raise _failure(fault, folder) from fault
    finally:
        root.removeFilter(repeated)


def _failure(fault: Exception, folder: Path) -> EquiportError:
    """Says whether the model could not be built or its weights not be converted: the stack does both in one call."""
    frames = traceback.extract_tb(fault.__traceback__)
    what = f"lacks {fault}" if isinstance(fault, KeyError) else f"{type(fault).__name__}: {fault}"
    if any(frame.name in _LOADING for frame in frames):
        return EquiportError(
            f"the port's weight conversion fails: {what}",
            where=folder,
            remedy="Check that the weights belong to this port, and its convert_hf_to_neuron_state_dict.",
        )
    own = [frame for frame in frames if "/neuronx_distributed" not in frame.filename] or frames
    return EquiportError(
        f"the port's model cannot be built: {what}",
        where=f"{own[-1].filename}:{own[-1].lineno}",
        remedy="Check the port's init_model against the config.",
    )


class _WatchedDict(dict[str, Any]):
    """A state dict that remembers its first keys, and which keys sharding hooks read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.first = set(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.read.add(key)
        return super().pop(key, *default)

    def unused(self, known: Mapping[str, Any]) -> list[str]:
        """Keys of no effect on a model whose keys are `known`.

        Hooks rename by copying and leave the former key behind: a key whose values stand under a known name has
        arrived. A name that a hook gave but that the model lacks (a bias without a place) is of no effect, and so is
        the key that it came from, which is the one reported. Any other key that a hook read went into something else.
        """
        values = dict(self)
        kept = {key: value for key, value in values.items() if key in known}
        lost = {key: value for key, value in values.items() if key not in known and not _twin(key, value, kept)}
        named_by_hook = {key: value for key, value in lost.items() if key not in self.first}
        found = []
        for key in sorted(set(lost) & self.first):
            renamed = _twin(key, lost[key], named_by_hook)
            if renamed:
                named_by_hook.pop(renamed)
            if renamed or key not in self.read:
                found.append(key)
        return found + list(named_by_hook)


def _twin(key: str, value: Any, among: Mapping[str, Any]) -> str | None:
    """The name in `among`, of the same kind (weight, bias ...), that holds the same values."""
    kind = key.rpartition(".")[2]
    alike = [
        name
        for name, other in among.items()
        if name.rpartition(".")[2] == kind and other.shape == value.shape and other.dtype == value.dtype
    ]
    for name in alike:
        if among[name].data_ptr() == value.data_ptr():
            return name
    head = value.flatten()[:16]
    for name in alike:
        if torch.equal(among[name].flatten()[:16], head) and torch.equal(among[name], value):
            return name
    return None


@contextmanager
def _counting(model_class: Any) -> Iterator[_Counted]:
    """Counts keys while one `model_class` is loaded: left over after sharding hooks, and at load_state_dict."""
    from neuronx_distributed.trace import trace

    counted = _Counted()
    own = model_class.__dict__.get("load_state_dict")
    inherited = model_class.load_state_dict
    hook = trace.invoke_preshard_hook

    def load_state_dict(self: nn.Module, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        wanted = nn.Module.state_dict(self)
        odd = [key for key, value in state_dict.items() if key in wanted and wanted[key].shape != value.shape]
        given = {key: value for key, value in state_dict.items() if key in wanted and key not in odd}
        counted.loaded += given
        counted.mis_shaped += odd
        # a parameter that bears two names arrives under either
        arrived = {wanted[key].data_ptr() for key in given if wanted[key].numel()}
        lacking = [key for key in wanted if key not in given and key not in odd]
        counted.missing += [key for key in lacking if wanted[key].data_ptr() not in arrived]
        counted.unexpected += [key for key in state_dict if key not in wanted]
        counted.numbers |= {key for key in state_dict if state_dict[key].dim() == 0}
        return inherited(self, given, strict=False)

    def invoke_preshard_hook(module: nn.Module, checkpoint: dict[str, Any], prefix: str) -> Any:
        if prefix != "":
            return hook(module, checkpoint, prefix)
        watched = _WatchedDict(checkpoint)
        counted.numbers |= {key for key, value in checkpoint.items() if value.dim() == 0}
        result = hook(module, watched, prefix)
        checkpoint.clear()
        checkpoint.update(watched)
        # Past this point the stack deletes what the model does not know.
        counted.unexpected += watched.unused(nn.Module.state_dict(module))
        return result

    model_class.load_state_dict = load_state_dict
    trace.invoke_preshard_hook = invoke_preshard_hook
    try:
        yield counted
    finally:
        trace.invoke_preshard_hook = hook
        if own is None:
            del model_class.load_state_dict
        else:
            model_class.load_state_dict = own
