"""Rotary tables are compared by calling them: their inputs are positions, which no hidden tensor carries."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from equiport.reference.model import Fixture
from equiport.structure.mapping import MappingEntry
from equiport.trace.module_io import output_tensors
from equiport.trace.sample import ComponentSample

_POSITIONS = 128


def rotary_tables(module: nn.Module, dtype: torch.dtype) -> Tensor | str:
    """cos and sin at positions 0.._POSITIONS-1, side by side: [positions, 2 * rotary_dim]; else why not."""
    hidden = torch.zeros(1, _POSITIONS, 1, dtype=dtype)
    positions = torch.arange(_POSITIONS)[None]
    try:
        with torch.no_grad():
            tables = output_tensors(module(hidden, positions))
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        return f"cannot be called as rotary(x, position_ids): {str(error).splitlines()[0][:200]}"
    if len(tables) != 2:
        return f"returns {len(tables)} tables, not cos and sin"
    return torch.cat([table.reshape(-1, table.shape[-1]) for table in tables], dim=-1)


def rotary_sample(
    entry: MappingEntry,
    source: str,
    target: str,
    index: tuple[int, ...],
    fixture: Fixture,
    tables: Mapping[str, Mapping[str, Tensor | str]],
) -> ComponentSample:
    """The tables of both sides as one sample. `tables`: ref_fp32, ref_bf16, target, target_fp32 -> path -> tables.

    Another layout of the tables is the port's choice and no fault: then nothing is compared here, and what the tables
    do to q and k is seen in the attention.
    """
    values = [tables[name][source if name.startswith("ref") else target] for name in tables]
    problem = next((value for value in values if isinstance(value, str)), "")
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    if not problem and len({value.shape for value in tensors}) > 1:
        problem = f"tables are laid out as {tuple(tensors[2].shape)}, the source's as {tuple(tensors[0].shape)}"
    return ComponentSample.of(entry, target, index, fixture, "tables", () if problem else tensors, problem)
