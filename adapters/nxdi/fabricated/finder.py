"""Fabricates closed packages on import, where they are absent."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from .behaviours import BEHAVIOURS, VERSION
from .symbol import FabricatedSymbol

CLOSED_PACKAGES = (
    "torch_xla",
    "torch_neuronx",
    "libneuronxla",
    "neuronxcc",
    "nki",
    "nkilib",
    "torchdistx",
)
# Public, but used for checkpoints in object storage only: not worth an installation for a CPU run.
STORAGE_PACKAGES = ("boto3", "botocore", "s3transfer", "tenacity")

# These ask whether the closed packages are there in order to use a device: the true answer, for them, is no.
OUTSIDERS = ("accelerate", "transformers", "torch", "huggingface_hub", "peft", "datasets", "lm_eval")


class FabricatedModule(types.ModuleType):
    """A module all of whose names exist, as fabricated symbols."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        symbol = FabricatedSymbol(f"{self.__name__}.{name}")
        setattr(self, name, symbol)
        return symbol


class _FabricatedLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return FabricatedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = VERSION  # type: ignore[attr-defined]
        prefix = module.__name__ + "."
        for dotted, value in BEHAVIOURS.items():
            if dotted.startswith(prefix) and "." not in dotted[len(prefix) :]:
                setattr(module, dotted[len(prefix) :], value)


def _importer() -> str:
    """The top-level package whose code caused the import under way."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(("importlib", "_frozen_importlib")):
            return name.partition(".")[0]
        frame = frame.f_back
    return ""


class FabricatedFinder(MetaPathFinder):
    """Last on `sys.meta_path`: answers for the given packages and everything below them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """A package spec for a closed package's module; None for any other name."""
        if fullname.partition(".")[0] not in self.packages or _importer() in OUTSIDERS:
            return None
        return ModuleSpec(fullname, _FabricatedLoader(), is_package=True)


def installed_finder() -> FabricatedFinder | None:
    """The finder that `install` put in place, if any."""
    return next((finder for finder in sys.meta_path if isinstance(finder, FabricatedFinder)), None)


def install() -> tuple[str, ...]:
    """Make every absent closed (or storage) package importable; returns their names. A package that is installed is
    left alone.

    Idempotent. `torch.classes.neuron`, which the open packages name in annotations, is fabricated too.
    """
    present = installed_finder()
    if present is not None:
        return present.packages
    wanted = CLOSED_PACKAGES + STORAGE_PACKAGES
    absent = tuple(name for name in wanted if name not in sys.modules and importlib.util.find_spec(name) is None)
    if "torch_xla" in absent:
        _settle_outsiders()
    sys.meta_path.append(FabricatedFinder(absent))
    if "torch_neuronx" in absent:
        torch.classes.neuron = FabricatedModule("torch.classes.neuron")
    return absent


def _settle_outsiders() -> None:
    """Let the libraries that look for XLA by themselves find none, before a fabricated one can be found."""
    if importlib.util.find_spec("accelerate") is not None:
        import accelerate  # noqa: F401  # looks once, when it is first imported
    from transformers.utils import import_utils

    # transformers 5 looks on each call, and asks this first; 4.57 has looked when it was imported.
    if hasattr(import_utils, "USE_TORCH_XLA"):
        import_utils.USE_TORCH_XLA = "0"
