"""Several defects in one module: no single one gives the port's output, so the nearest are tried together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Explained, Hypothesis
from equiport.localize.surgery import Surgery

#: What a model's constructor or forward raises for a defect of another architecture.
MISFITS = (RuntimeError, AttributeError, TypeError, ValueError, IndexError, KeyError, AssertionError)
#: What stands between the words of two defects that were put in together.
JOINT = "; and "
_NEARER = 0.95
_WIDTH = 4
_MOST = 700


def together(first: Explained, second: Candidate) -> Candidate:
    """Both defects as one. There is no draft: each has its own place."""

    def edit(at: Case, surgery: Surgery) -> None:
        first.candidate.edit(at, surgery)
        second.edit(at, surgery)

    repairs = "; ".join(text for text in (first.repair, second.repair) if text)
    return Candidate(f"{first.says}{JOINT}{second.says}", edit, repairs)


def nearest(found: Sequence[Explained], before: float) -> list[Explained]:
    """The few that bring the source nearest to the port, one a kind, each by some margin."""
    by_kind: dict[str, Explained] = {}
    for item in sorted(found, key=lambda item: item.r32):
        if item.r32 < _NEARER * before:
            by_kind.setdefault(item.kind, item)
    return list(by_kind.values())[:_WIDTH]


def extended(
    case: Case, starts: Sequence[Explained], kinds: Sequence[Hypothesis]
) -> Iterator[tuple[Explained, Hypothesis, Candidate, Mapping[str, Tensor]]]:
    """Every second defect on top of each start, with the source's outputs under both; at most 700 in all.

    Kinds whose numbers are fitted see the source with the first defect in it.
    """
    tried = 0
    for start in starts:
        with Surgery() as surgery:
            start.candidate.edit(case, surgery)
            plain = case.outputs()
            for kind in kinds:
                for second in kind.candidates(case, plain):
                    if second.says in start.says:
                        continue
                    if tried >= _MOST:
                        return
                    tried += 1
                    try:
                        with Surgery() as further:
                            second.edit(case, further)
                            outputs = case.outputs()
                    except MISFITS:
                        continue
                    yield start, kind, together(start, second), outputs
