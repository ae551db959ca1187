"""Markers that bound a layer for the compiler: no computation of their own."""

from __future__ import annotations

from typing import Any

from neuronx_distributed._standin.missing import attribute_hook
from torch import nn

__getattr__ = attribute_hook(__name__)


class _Marker(nn.Module):
    def forward(self, *args: Any) -> Any:
        """The argument itself; several, as a tuple."""
        return args[0] if len(args) == 1 else args


class ModuleMarkerStartWrapper(_Marker):
    """Start of a layer."""


class ModuleMarkerEndWrapper(_Marker):
    """End of a layer."""
