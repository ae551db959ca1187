"""The closed packages below NxD Inference, fabricated on import for CPU runs where they are absent."""

from .finder import CLOSED_PACKAGES, FabricatedFinder, FabricatedModule, install, installed_finder
from .symbol import FabricatedBase, FabricatedSymbol, KernelAbsentError

__all__ = [
    "CLOSED_PACKAGES",
    "FabricatedBase",
    "FabricatedFinder",
    "FabricatedModule",
    "FabricatedSymbol",
    "KernelAbsentError",
    "install",
    "installed_finder",
]
