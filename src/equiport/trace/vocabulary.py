"""Embeddings over every id: a fixture draws a few tokens, a fault in the lookup of another id would go unseen.

A table of 10^5 rows is not stored four times: each row is projected onto a few fixed directions in float64. Equal rows
have equal projections; an error keeps its size, relative to that of the baseline, on average.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equiport.trace.module_io import output_tensors

_CHUNK = 2048
_DIRECTIONS = 8


def embedded_ids(module: nn.Module) -> int:
    """How many ids a source's embedding knows; 0 where it does not say."""
    count = getattr(module, "num_embeddings", 0)
    return count if isinstance(count, int) else 0


def vocabulary_table(module: nn.Module, ids: int) -> Tensor | str:
    """Projections [ids, 8] float64 of the module's output for ids 0..ids-1; a text says why there are none.

    An id that the module refuses as out of range has NaN in its place: it belongs to the vocabulary all the same.
    """
    rows: list[Tensor] = []
    directions: Tensor | None = None
    for start in range(0, ids, _CHUNK):
        chunk = torch.arange(start, min(start + _CHUNK, ids))[None]
        try:
            with torch.no_grad():
                tensors = output_tensors(module(chunk))
        except IndexError:
            rows.append(torch.full((chunk.shape[1], _DIRECTIONS), torch.nan, dtype=torch.float64))
            continue
        except (TypeError, RuntimeError, ValueError, AttributeError) as error:
            return f"cannot be called on ids: {(str(error).splitlines() or [''])[0][:200]}"
        if not tensors or tensors[0].shape[:2] != chunk.shape or not tensors[0].is_floating_point():
            return "does not return a row an id"
        flat = tensors[0][0].flatten(1).double()
        if directions is None:
            generator = torch.Generator().manual_seed(0)
            directions = torch.randn(flat.shape[1], _DIRECTIONS, generator=generator, dtype=torch.float64)
        if len(directions) != flat.shape[1]:
            return "returns rows of several widths"
        rows.append(flat @ directions)
    return torch.cat(rows) if rows else "knows no ids"
