"""The alive gate and the consistency gate: does the port move when the source moves, and agree with itself?"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from equiport.compare.gates import GateResult
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict


class Nudge(BaseModel):
    """What a nudge of one tensor or config key did to the fp32 logits: relative changes; None: did not run.

    `filled`: keys that the source's config class fills from this one, absent from config.json when it was nudged;
    `target_filled`: the port's change when they stand there with their new values. `limit`: the key's own value, of a
    `config limit`: one that moves nothing there, and was nudged to where the prompts reach it.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    name: str
    reference: float
    target: float | None
    note: str = ""
    filled: tuple[str, ...] = ()
    target_filled: float | None = None
    limit: int | None = None


class Consistency(BaseModel):
    """One way to the same logits against another: difference in units of ‖ref_bf16 − ref_fp32‖.

    `own` is the reference's own inconsistency between the two ways, in the same unit.
    """

    model_config = ConfigDict(frozen=True)

    check: str
    subject: str
    difference: float
    own: float = 0.0


def alive_gate(nudges: Sequence[Nudge], thresholds: Thresholds) -> GateResult:
    """Every nudge moves the port if it moves the reference; and no tensor moves the port alone.

    A `config switch` that moves the source alone is a blind spot: a port may be made for one of its values.

    A `config limit` that moves both is a blind spot: at its own value no prompt reaches it.

    A config key that moves the port alone is a note: another key may hold the same value for the reference. What moves
    neither is a blind spot. An empty list is NOT RUN. A port that refuses a changed config reads it.
    """
    if not nudges:
        return GateResult("alive", Verdict.NOT_RUN)
    reasons: list[Reason] = []
    blind: list[Reason] = []
    notes: list[Reason] = []
    limit = thresholds.alive
    for nudge in nudges:
        moves = nudge.reference > limit
        if nudge.limit is not None and moves and (nudge.target is None or nudge.target > limit):
            message = f"no prompt here reaches {nudge.name} = {nudge.limit}: it is read, not compared where it acts"
            blind.append(reason(ReasonCode.NOT_EXCITED, message, nudge.name))
        if nudge.target is None:
            notes.append(reason(ReasonCode.ALIVE_REFUSED, nudge.note or "was refused by the port", nudge.name))
            continue
        ours = nudge.target > limit
        changes = f"changes {nudge.reference:.2g} (source) and {nudge.target:.2g} (port)"
        if nudge.limit is not None:
            changes += f"; its own value, {nudge.limit}, is beyond every prompt here"
        if not ours and nudge.target_filled is not None and nudge.target_filled > limit:
            keys = ", ".join(nudge.filled)
            changes += (
                f"; it changes {nudge.target_filled:.2g} when config.json has the new {keys} too, which transformers"
                f" fills from {nudge.name}: the port reads the file itself, and of {nudge.name} alone it makes nothing"
            )
        if nudge.target != nudge.target or nudge.reference != nudge.reference:
            reasons.append(reason(ReasonCode.NON_FINITE_METRIC, f"{nudge.kind} nudged: {changes}", nudge.name))
        elif moves and not ours and nudge.kind == "config switch":
            message = (
                f"config switch turned: the source moves, the port does not: it is made for this value alone; {changes}"
            )
            blind.append(reason(ReasonCode.UNREAD_KEY, message, nudge.name))
        elif moves and not ours:
            code = ReasonCode.DEAD_TENSOR if nudge.kind == "tensor" else ReasonCode.UNREAD_KEY
            reasons.append(
                reason(code, f"{nudge.kind} nudged: the source moves, the port does not; {changes}", nudge.name)
            )
        elif ours and not moves and nudge.kind == "tensor":
            message = f"tensor nudged: the port moves, the source does not; {changes}"
            reasons.append(reason(ReasonCode.ONLY_PORT_MOVES, message, nudge.name))
        elif not moves and not ours and nudge.kind == "tensor":
            blind.append(reason(ReasonCode.NOT_EXCITED, "tensor nudged: neither side moves", nudge.name))
    verdict = Verdict.FAIL if reasons else Verdict.PASS
    return GateResult("alive", verdict, tuple(reasons), (), tuple(notes), tuple(blind))


def consistency_gate(found: Sequence[Consistency], thresholds: Thresholds) -> GateResult:
    """Each difference at most the limit, or at most five times the reference's own. An empty list is NOT RUN."""
    if not found:
        return GateResult("consistency", Verdict.NOT_RUN)
    reasons = []
    for item in found:
        limit = max(thresholds.consistency, thresholds.consistency_own * item.own)
        if not item.difference <= limit:
            message = f"{item.check}: {item.difference:.3g} of the bf16 baseline > {limit:.3g}"
            reasons.append(reason(ReasonCode.INCONSISTENT, message, item.subject))
    return GateResult("consistency", Verdict.FAIL if reasons else Verdict.PASS, tuple(reasons))
