"""The kinds of root causes: every Hypothesis in `localize/causes/`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from equiport.localize import causes
from equiport.localize.hypothesis import Hypothesis


@cache
def hypotheses() -> tuple[Hypothesis, ...]:
    """One instance of each, cheapest first."""
    for info in pkgutil.iter_modules(causes.__path__):
        importlib.import_module(f"{causes.__name__}.{info.name}")
    found = [cls() for cls in Hypothesis.__subclasses__()]
    return tuple(sorted(found, key=lambda one: (one.cost, one.kind)))
