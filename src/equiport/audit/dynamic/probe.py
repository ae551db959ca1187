"""A job that changes nothing and watches: whose code runs, whether the port repeats itself, what it does to inputs."""

from __future__ import annotations

import inspect
import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from equiport.audit.dynamic.bugs import fitting_bugs
from equiport.audit.dynamic.structures import copied, distance, tensors
from equiport.audit.dynamic.watch import PortCall, running_test
from equiport.audit.names import hf_kind

RUNS_REFERENCE, NOT_REPEATABLE, CHANGES_INPUTS = "runs-reference", "not-deterministic", "input-changed"
_CACHES = ("cache", "past", "kv")
_SAME_FP32, _SAME_BF16 = 1e-5, 4e-3
#: Calls that are looked at closely in one test.
_MOST_CALLS = 24


class ReferenceBlocked(RuntimeError):
    """The port called code of the reference while that was blocked."""


class Probe:
    """Watches every outermost call. `facts` are (rule, test, sentence); `bugs` those of the corpus that fit."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, str, str]] = []
        self.bugs: dict[str, float] = {}
        self.port_code: set[CodeType] = set()
        self.other_code: set[CodeType] = set()
        self.leaves: set[str] = set()
        self._seen: dict[str, int] = {}
        self._surveyed: set[tuple[type, torch.dtype | None]] = set()

    def call(self, call: PortCall) -> Any:
        """The result, after a look at how it came to be; later calls of one test are let through."""
        outer = sys.getprofile()
        sys.setprofile(None)
        try:
            return self._watched(call)
        finally:
            sys.setprofile(outer)

    def _watched(self, call: PortCall) -> Any:
        test = running_test()
        self._seen[test] = self._seen.get(test, 0) + 1
        if self._seen[test] > _MOST_CALLS or call.owner is None:
            return self.guarded(call)
        given, state = copied((call.args, call.kwargs)), _state(call.owner)
        random = torch.get_rng_state()
        out = self.guarded(call)
        kept = copied(out)
        self._inputs(call, given, test)
        after, random_after = _state(call.owner), torch.get_rng_state()
        self._again(call, given, state, kept, test)
        torch.set_rng_state(random)
        kind = (type(call.owner), _dtype(kept))
        if kind not in self._surveyed and kind[1] in (torch.float32, torch.bfloat16):
            self._surveyed.add(kind)
            _restore(call.owner, state)
            again = PortCall(call.name, call.run, call.owner, *copied(given))
            for name, effect in fitting_bugs(again, kept).items():
                self.bugs[name] = max(effect, self.bugs.get(name, 0.0))
        _restore(call.owner, after)
        torch.set_rng_state(random_after)
        return out

    def _again(self, call: PortCall, given: Any, state: dict[str, Tensor], out: Any, test: str) -> None:
        """The same call once more, its buffers as before and the random numbers others."""
        assert call.owner is not None
        _restore(call.owner, state)
        torch.manual_seed(torch.initial_seed() + 1)
        arguments, keywords = copied(given)
        try:
            repeated = call.run(*arguments, **keywords)
        except Exception as error:
            self._fact(NOT_REPEATABLE, test, f"{call.name} raises {type(error).__name__} when it is called again")
            return
        gap = distance(repeated, out)
        wide = all(item.dtype is torch.float32 for item in tensors(out) if item.is_floating_point())
        if gap > (_SAME_FP32 if wide else _SAME_BF16):
            self._fact(NOT_REPEATABLE, test, f"{call.name} gives something else on the same inputs (by {gap:.2g})")

    def _inputs(self, call: PortCall, before: Any, test: str) -> None:
        names = _parameter_names(call)
        for name, now, then in zip(names, (*call.args, *call.kwargs.values()),
                                   (*before[0], *before[1].values()), strict=False):  # fmt: skip
            if any(word in name for word in _CACHES):
                continue
            if distance(now, then) > 0.0:
                self._fact(CHANGES_INPUTS, test, f"{call.name} changes its argument {name} in place")

    def guarded(self, call: PortCall) -> Any:
        """The result, while blocks of the reference raise when the port calls them."""
        outer = sys.getprofile()
        sys.setprofile(self._inside)
        try:
            return call.result()
        finally:
            sys.setprofile(outer)

    def _inside(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        self.port_code.add(code)
        if not _of_reference(code) or "__qualname__" in frame.f_locals or code.co_name.startswith("<"):
            return
        name, kind = _named(frame)
        if kind == "block":
            self._fact(RUNS_REFERENCE, running_test(), f"the port calls {name}, which is the reference's")
            raise ReferenceBlocked(f"{name} is blocked while the port runs")
        if kind == "leaf":
            self.leaves.add(name)

    def outside(self, frame: FrameType, event: str, _: Any) -> None:
        """A profiler for what runs outside of the port."""
        if event == "call":
            self.other_code.add(frame.f_code)

    def _fact(self, rule: str, test: str, said: str) -> None:
        if (rule, test, said) not in self.facts:
            self.facts.append((rule, test, said))


def _dtype(out: Any) -> torch.dtype | None:
    return next((item.dtype for item in tensors(out) if item.is_floating_point()), None)


def _parameter_names(call: PortCall) -> list[str]:
    try:
        forward: Any = getattr(call.owner, "forward", None)
        names = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        names = []
    placed = [names[place] if place < len(names) else f"argument {place}" for place in range(len(call.args))]
    return [*placed, *call.kwargs]


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, those that are not stored too: caches live there."""
    return {name: item.detach().clone() for name, item in module.named_buffers()}


def _restore(module: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, item in module.named_buffers():
            if name in state and state[name].shape == item.shape:
                item.copy_(state[name])


def _of_reference(code: CodeType) -> bool:
    folders = code.co_filename.split(os.sep)
    return "transformers" in folders and "models" in folders and folders[-1].startswith("modeling_")


def _named(frame: FrameType) -> tuple[str, str]:
    """The dotted name of what runs, and what kind of thing it is in transformers."""
    module = str(frame.f_globals.get("__name__", ""))
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    cls = owner if isinstance(owner, type) else type(owner) if owner is not None else None
    if cls is not None:
        home = next((item for item in cls.__mro__ if item.__dict__.get(frame.f_code.co_name) is not None
                     and item.__module__ == module), None)  # fmt: skip
        if home is not None:
            return f"{home.__name__}.{frame.f_code.co_name}", hf_kind(f"{module}.{home.__name__}")
    return frame.f_code.co_name, hf_kind(f"{module}.{frame.f_code.co_name}")
