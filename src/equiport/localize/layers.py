"""A cause that was proven in one layer, tried in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equiport.localize.case import Case
from equiport.localize.combined import JOINT, MISFITS
from equiport.localize.hypothesis import Candidate
from equiport.localize.registry import hypotheses
from equiport.localize.surgery import Surgery


def explains(says: str, proven_at: Sequence[str], case: Case, limit: float) -> bool:
    """Whether the defects that `says` names give the target here too: R32 at most `limit`.

    `proven_at`: the source modules of the layer where they were proven, in the order of this case's own.
    """
    for there, here in zip(proven_at, case.sources, strict=True):
        says = says.replace(there, here)
    with torch.no_grad(), Surgery() as surgery:
        for part in says.split(JOINT):
            candidate = _named(part, case)
            if candidate is None:
                return False
            try:
                candidate.edit(case, surgery)
            except MISFITS:
                return False
        try:
            return case.distance(case.outputs()) <= limit
        except MISFITS:
            return False


def _named(says: str, case: Case) -> Candidate | None:
    """The candidate of these words; kinds whose numbers are fitted see what is edited so far."""
    plain = case.outputs()
    found = (one for kind in hypotheses() for one in kind.candidates(case, plain))
    return next((one for one in found if one.says == says), None)
