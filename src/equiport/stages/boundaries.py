"""Work that a port does on the other side of a module's border: the module differs, what is around it does not.

A port may scale in the embedding what its source scales after it, or multiply inside a branch what its source
multiplies around it. The function is the same, and the module that holds both sides of the border proves it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from equiport.compare.verdict import Verdict
from equiport.stages.component_rows import ComponentRow
from equiport.stages.instances import InstanceRow
from equiport.structure.mapping import ENTRY_NAME, HEAD_PATH, ComponentMapping

#: An error of the module so many times that of what is around it is undone there, not drowned: a branch would have to
#: be ten thousand times smaller than what it is added to.
UNDONE = 1e4
_LEAST_R32 = 1e-5
_RUN = ("prefill", "decode")


def settle_boundaries(
    rows: Sequence[ComponentRow], instances: Sequence[InstanceRow], mapping: ComponentMapping
) -> list[ComponentRow]:
    """`rows`, with those of a component as PASS and its surroundings named (`boundary`), where

    - what is around it passes with fp32 evidence in every fixture: a module that contains it, the whole way to the
      first layer, or from the head's input to the logits;
    - it fails where what is around it was run too, in prefill and decode: not on ids or positions of its own;
    - every failing instance of it is off in fp32 by at least 1e4 times the worst of what is around it, or has another
      shape: a fault inside a module that passes as a whole would have to leave no trace in it. Or none fails, and it
      only rounds to bf16 what its source leaves in fp32.
    """
    by_component: dict[str, list[ComponentRow]] = defaultdict(list)
    for row in rows:
        by_component[row.component].append(row)
    moved: dict[str, str] = {}
    for component, own in by_component.items():
        if not any(row.verdict is Verdict.FAIL for row in own):
            continue
        bad = [item for item in instances if item.component == component and item.excess > 1]
        if any(item.phase not in _RUN for item in bad) or not (bad or _only_rounded(own)):
            continue
        for around in _around(component, mapping):
            limit = _worst_around(by_component.get(around, []), {row.fixture for row in own})
            if limit is not None and all(item.r32 is None or item.r32 >= UNDONE * limit for item in bad):
                moved[component] = around
                break
    return [
        row.model_copy(update={"verdict": Verdict.PASS, "boundary": moved[row.component]})
        if row.component in moved and row.verdict is not Verdict.PASS
        else row
        for row in rows
    ]


def _only_rounded(rows: Sequence[ComponentRow]) -> bool:
    """Exact in fp32, and in bf16 within a unit in the last place of what its source leaves in fp32 (rotary tables):
    whether that is too coarse is for the bf16 gate of what is around it to say."""
    return all(row.exact == row.comparisons and row.r32_worst is not None for row in rows)


def _around(component: str, mapping: ComponentMapping) -> list[str]:
    """The tested components that hold this one whole, the smallest first."""
    tested = {entry.name: entry for entry in mapping.tested}
    entry = tested.get(component)
    if entry is None or len(entry.target) != 1:
        return []
    holders = [name for name in tested if component.startswith(name + ".")]
    if entry.component_type == "lm_head":
        holders.append(HEAD_PATH.name)
    if entry.component_type == "embedding":
        holders.append(ENTRY_NAME)
    return sorted((name for name in holders if name in tested), key=len, reverse=True)


def _worst_around(rows: Sequence[ComponentRow], fixtures: set[str]) -> float | None:
    """The worst R32 of what is around, at least 1e-5; None where it does not pass, or not everywhere, in fp32."""
    if not fixtures <= {row.fixture for row in rows} or any(row.verdict is not Verdict.PASS for row in rows):
        return None
    figures = [max(row.r32_worst or 0.0, row.r32_slice_worst or 0.0) for row in rows if row.r32_worst is not None]
    return max(*figures, _LEAST_R32) if len(figures) == len(rows) and not any(row.boundary for row in rows) else None
