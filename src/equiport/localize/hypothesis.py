"""A hypothesis is a kind of root cause; its candidates are concrete defects that can be put into the source model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from equiport.localize.case import Case
from equiport.localize.drafts import Draft
from equiport.localize.surgery import Surgery

Edit = Callable[[Case, Surgery], None]


@dataclass(frozen=True)
class Candidate:
    """One concrete defect: `edit` puts it into a case's source model; it must not depend on the case's weights.

    `says` is the sentence for the report; `repair` what the port needs, in words; `draft` the same for a patch,
    where the defect has an inverse.
    """

    says: str
    edit: Edit
    repair: str = ""
    draft: Draft | None = None


class Hypothesis(ABC):
    """A kind of root cause. Register one by subclassing it in `localize/causes/`.

    `kind` is its name in reports and in the corpus; `cost` orders equals: the simpler explanation wins.
    """

    kind: str
    cost: int = 1

    @abstractmethod
    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Defects of this kind that make sense for the case; none where it does not apply.

        `reference`: the unedited source's outputs, phase -> [N, ...], for kinds whose parameters are fitted.
        """


@dataclass(frozen=True)
class Explained:
    """A candidate with its distance: R32 of the target against the source with the defect in it."""

    kind: str
    says: str
    repair: str
    r32: float
    worst: float
    candidate: Candidate = field(repr=False)
