"""Sees when a test enters the port from outside, and lets a mode decide what it gets back.

The port is: classes and functions of its files, modules of the serving stack, and what a block test is told to be the
port. Calls inside one of these are the port's own business: only the outermost counts.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from torch import nn

from equiport.audit.dynamic.structures import tensors
from equiport.audit.names import STACK_ROOTS


@dataclass(frozen=True)
class PortCall:
    """One call of the port from outside. `owner`: its module, None for a plain function."""

    name: str
    run: Callable[..., Any]
    owner: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """What the port gives."""
        return self.run(*self.args, **self.kwargs)


class Mode(Protocol):
    """What happens at the port's border in one job."""

    def call(self, call: PortCall) -> Any:
        """Run the call and give the test what it is to see."""


class Plain:
    """Changes nothing."""

    def call(self, call: PortCall) -> Any:
        """As it is."""
        return call.result()


class Watch:
    """The port's border in this process; one alone can be in force."""

    def __init__(self, port_files: Iterable[str], edits: Callable[[str], str] | None = None) -> None:
        """`edits`: changes the text of each port file before it is compiled."""
        self.files = frozenset(os.path.realpath(file) for file in port_files)
        self.edits = edits
        self.mode: Mode = Plain()
        #: the toolkit's block test; conditions change what it is given
        self.block_test: Callable[..., Any] | None = None
        self.depth = 0
        self.calls: Counter[str] = Counter()
        self.port_raised = False
        self._kinds: dict[type, bool] = {}
        self._adopted: set[type] = set()

    def install(self) -> None:
        """Stand at the border: module calls, and port files as they are imported."""
        watch, original = self, nn.Module.__call__

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watch.depth or not watch.is_port(type(module)):
                return original(module, *args, **kwargs)
            run = functools.partial(original, module)
            return watch.enter(PortCall(type(module).__name__, run, module, args, kwargs))

        nn.Module.__call__ = call  # type: ignore[method-assign]
        loader = importlib.machinery.SourceFileLoader
        execute, read = loader.exec_module, loader.get_data

        def exec_module(self: Any, module: ModuleType) -> None:
            execute(self, module)
            if os.path.realpath(getattr(module, "__file__", None) or "") in watch.files:
                watch.wrap(module)

        def get_data(self: Any, path: str) -> bytes:
            data: bytes = read(self, path)
            if watch.edits is not None and os.path.realpath(path) in watch.files:
                return watch.edits(data.decode("utf-8")).encode()
            return data

        loader.exec_module = exec_module  # type: ignore[method-assign]
        loader.get_data = get_data  # type: ignore[method-assign]

    def is_port(self, cls: type) -> bool:
        """Whether a class is the port's: by its file, by its package, or because a test said so."""
        found = self._kinds.get(cls)
        if found is None:
            module = sys.modules.get(cls.__module__)
            file = os.path.realpath(getattr(module, "__file__", None) or "")
            found = file in self.files or cls.__module__.partition(".")[0] in STACK_ROOTS
            self._kinds[cls] = found
        return found or cls in self._adopted

    def adopt(self, cls: Any) -> None:
        """Take a class for the port's: a block test names it."""
        if isinstance(cls, type):
            self._adopted.add(cls)

    def wrap(self, module: ModuleType) -> None:
        """Stand before the forwards, constructors and functions of a port file."""
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, type):
                self._wrap_class(value)
            elif inspect.isfunction(value):
                setattr(module, name, self._function(value))

    def _wrap_class(self, cls: type) -> None:
        forward = getattr(cls, "forward", None)
        if inspect.isfunction(forward) and forward.__name__ != "_forward_unimplemented":
            watch = self

            @functools.wraps(forward)
            def entered(module: Any, *args: Any, **kwargs: Any) -> Any:
                if watch.depth:
                    return forward(module, *args, **kwargs)
                owner = module if isinstance(module, nn.Module) else None
                run = functools.partial(forward, module)
                return watch.enter(PortCall(type(module).__name__, run, owner, args, kwargs))

            cls.forward = entered  # type: ignore[attr-defined]
        made = cls.__dict__.get("__init__")
        if inspect.isfunction(made):
            cls.__init__ = self._inside(made)  # type: ignore[misc]

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs while the port is built is inside: nothing of it is a call from outside."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return inside

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return function(*args, **kwargs)
            return self.enter(PortCall(function.__name__, function, None, args, kwargs))

        return called

    def enter(self, call: PortCall) -> Any:
        """Cross the border: once, whatever is called inside."""
        self.depth += 1
        try:
            out = self.mode.call(call)
        except BaseException:
            self.port_raised = True
            raise
        finally:
            self.depth -= 1
        if next(tensors(out), None) is not None:
            self.calls[running_test()] += 1
        return out

    def offer(self, value: Any, run: Callable[..., Any], name: str) -> Any:
        """Results of the port that were stored before: they cross the border as if they were computed now."""
        return self.enter(PortCall(name, run, None, (value,), {}))


def running_test() -> str:
    """The test that runs now, as pytest names it; empty while files are collected."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]


def border(watch: Watch) -> None:
    """Tell the watch what the toolkit's own entry points take for the port, and what they give from a store."""
    from equiport.port import translate_block_test
    from equiport.stages import component_fixtures

    judge = translate_block_test.test_block_correctness

    @functools.wraps(judge)
    def block_test(neuron_block_class: Any, *args: Any, **kwargs: Any) -> Any:
        watch.adopt(neuron_block_class)
        return (watch.block_test or judge)(neuron_block_class, *args, **kwargs)

    block_test.__test__ = False  # type: ignore[attr-defined]
    translate_block_test.test_block_correctness = block_test
    stored = component_fixtures.component_samples

    @functools.wraps(stored)
    def samples(*args: Any, **kwargs: Any) -> Any:
        return [_offered(watch, sample) for sample in stored(*args, **kwargs)]

    component_fixtures.component_samples = samples


def _offered(watch: Watch, sample: Any) -> Any:
    import dataclasses

    sides = (sample.target, sample.target_fp32)
    if sides[0] is None:
        return sample
    target, target_fp32 = watch.offer(sides, lambda value: value, sample.name)
    return dataclasses.replace(sample, target=target, target_fp32=target_fp32)
