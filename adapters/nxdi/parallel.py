"""Brings up what NxD layers need on a CPU: the import path, a gloo group, the parallel state; once a process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from equiport.errors import EquiportError
from equiport.stacks.contract import Tier

from .environment import NXD, NXDI, STAND_IN, Environment
from .fabricated import install

# of this process, whatever adapter asked for them
_groups: dict[Any, Any] = {}
_MANAGED = ("NXD_CPU_MODE", "NXD_LOG_LEVEL")


def _harmless(record: logging.LogRecord) -> bool:
    # Said of every layer at TP=1 with grouped heads, where the conversion changes nothing.
    return "CONVERT_TO_MHA" not in record.getMessage()


class CpuParallelState:
    """One for each process. `bring_up` is idempotent; `tear_down` undoes what it did, environment included."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._saved: dict[str, str | None] | None = None
        self._own_group = False
        self._tp_degree = 0

    def enter_path(self) -> None:
        """Make `neuronx_distributed*` importable from the tier's place, and the closed packages below it.

        Raises:
            EquiportError: the packages were already imported from the other place.
        """
        if self._saved is None:
            self._saved = {name: os.environ.get(name) for name in _MANAGED}
        for name in (NXD, NXDI):
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if loaded is not None and (str(STAND_IN) in loaded) != (self.environment.tier is Tier.STAND_IN):
                raise EquiportError(
                    f"{name} was already imported from {loaded}",
                    remedy="Use one tier a process: start a new one for the other.",
                )
        for path in reversed(self.environment.paths):
            if str(path) not in sys.path:
                sys.path.insert(0, str(path))
        install()
        # Its start prints a dozen lines a process; a level that the user has set is kept.
        os.environ.setdefault("NXD_LOG_LEVEL", "error")
        logging.getLogger("Neuron").addFilter(_harmless)

    def bring_up(self, tp_degree: int) -> None:
        """Parallel state of `tp_degree` ranks: one process for 1, `torchrun --nproc-per-node` processes for more.

        Raises:
            EquiportError: more ranks are asked for than this process belongs to.
        """
        self.enter_path()
        os.environ["NXD_CPU_MODE"] = "1"
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if tp_degree != world:
            raise EquiportError(
                f"{tp_degree} tensor-parallel ranks are asked for, this run has {world}",
                field="tp_degree",
                remedy=f"Start with `torchrun --nproc-per-node {tp_degree}`, or use tp_degree {world}.",
            )
        if not dist.is_initialized():
            self._init_group(world)
        from neuronx_distributed.parallel_layers import parallel_state

        if parallel_state.model_parallel_is_initialized() and self._tp_degree not in (0, tp_degree):
            parallel_state.destroy_model_parallel()
        if not parallel_state.model_parallel_is_initialized():
            with self.reused_groups():
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=tp_degree, skip_collective_init=True
                )
        self._tp_degree = tp_degree

    def _init_group(self, world: int) -> None:
        if world == 1:
            # A store inside the process: no port to be free, no address to be resolved.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("gloo")
        _groups.clear()  # those of an earlier process group are dead
        self._own_group = True

    @contextmanager
    def reused_groups(self) -> Iterator[None]:
        """Groups of the same ranks are made once: each one keeps threads, and `to_cpu` asks for all of them anew."""
        make = dist.new_group

        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *rest: Any, **kw: Any) -> Any:
            key = (tuple(ranks) if ranks is not None else None, str(backend), repr((timeout, rest, sorted(kw.items()))))
            if key not in _groups:
                _groups[key] = make(ranks, timeout, backend, *rest, **kw)
            return _groups[key]

        dist.new_group = new_group
        try:
            yield
        finally:
            dist.new_group = make

    @contextmanager
    def single_start(self) -> Iterator[None]:
        """Hides WORLD_SIZE from the stack, which would otherwise start the group that is up already once more."""
        hidden = os.environ.pop("WORLD_SIZE", None)
        try:
            yield
        finally:
            if hidden is not None:
                os.environ["WORLD_SIZE"] = hidden

    def tear_down(self) -> None:
        """Destroy the parallel state and the group, if made here, and restore the environment."""
        if self._tp_degree:
            from neuronx_distributed.parallel_layers import parallel_state

            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            _groups.clear()
        self._own_group, self._tp_degree = False, 0
        for name, value in (self._saved or {}).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._saved = None
