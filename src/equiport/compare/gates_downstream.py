"""The gate on downstream tasks: does the port score as the source does?"""

from __future__ import annotations

from math import ceil, sqrt

from equiport.compare.gates import Figure, GateResult
from equiport.compare.numbers import Frozen, Number
from equiport.compare.paired import PairedDifference, items_to_settle
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.verdict import Verdict


class PublishedScore(Frozen):
    """A score that the model reached elsewhere: the port must reach `gpu_mean − k·stderr`."""

    gpu_mean: Number
    stderr: Number
    k: Number = 2.0

    @property
    def limit(self) -> float:
        """The lowest score that passes."""
        return self.gpu_mean - self.k * self.stderr


def downstream_gate(found: PairedDifference, tolerance: float, chance: float, subject: str = "") -> GateResult:
    """Paired scores of one task, higher being better.

    FAIL when the whole interval lies below −tolerance. INCONCLUSIVE while it is wider than ±tolerance, when the
    difference itself is below −tolerance but its interval is not, or when the baseline is not above `chance` by three
    standard errors and the tolerance: then a broken port would score alike. Else PASS.
    """
    figures = (
        Figure("difference", found.difference, -tolerance),
        Figure("half_width", found.half_width, tolerance),
        Figure("baseline", found.baseline, chance),
    )
    shown = f"{found.difference:+.4f}, interval [{found.low:+.4f}, {found.high:+.4f}] over {found.items} items"
    if found.high < -tolerance:
        message = f"the score falls by more than {tolerance:g}: {shown}"
        failed = reason(ReasonCode.DOWNSTREAM_REGRESSION, message, subject)
        return GateResult("downstream", Verdict.FAIL, (failed,), figures)
    unclear = []
    noise = 3 * sqrt(max(found.baseline * (1 - found.baseline), 0.0) / found.items)
    if not found.baseline - chance > max(noise, tolerance):
        message = f"the baseline scores {found.baseline:.3f} where guessing gives {chance:.3f}: no fault would show"
        unclear.append(reason(ReasonCode.BASELINE_AT_CHANCE, message, subject))
    if found.half_width > tolerance:
        needed = items_to_settle(found, tolerance)
        message = f"the interval is wider than ±{tolerance:g}: {shown}; about {needed} items would settle it"
        unclear.append(reason(ReasonCode.TOO_FEW_ITEMS, message, subject))
    elif found.difference < -tolerance:
        needed = items_to_settle(found, tolerance, -tolerance - found.difference)
        message = (
            f"the score falls by more than {tolerance:g}, perhaps by chance: {shown}; about {needed} items settle it"
        )
        unclear.append(reason(ReasonCode.TOO_FEW_ITEMS, message, subject))
    return GateResult("downstream", Verdict.INCONCLUSIVE if unclear else Verdict.PASS, tuple(unclear), figures)


def published_gate(score: float, items: int, published: PublishedScore, subject: str = "") -> GateResult:
    """The port's score against a published one. INCONCLUSIVE when the port saw far fewer items than the published
    standard error stands for: its own must be at most 1.5 times as large.
    """
    limit = published.limit
    figures = (Figure("score", score, limit),)
    if not score >= limit:
        message = f"scores {score:.4f} < {published.gpu_mean:g} − {published.k:g}·{published.stderr:g} = {limit:.4f}"
        failed = reason(ReasonCode.DOWNSTREAM_REGRESSION, message, subject)
        return GateResult("published", Verdict.FAIL, (failed,), figures)
    # a sample that happens to be all right or all wrong has an error all the same
    share = (score * items + 1) / (items + 2)
    most = 1.5 * published.stderr
    if sqrt(share * (1 - share) / items) > most:
        needed = max(items + 1, ceil(share * (1 - share) / most**2))
        message = f"{items} items are fewer than the published score stands for; about {needed} would settle it"
        unclear = reason(ReasonCode.TOO_FEW_ITEMS, message, subject)
        return GateResult("published", Verdict.INCONCLUSIVE, (unclear,), figures)
    return GateResult("published", Verdict.PASS, (), figures)
