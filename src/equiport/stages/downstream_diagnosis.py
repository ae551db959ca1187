"""Which items the two sides answer differently, how close they were, and what to do (seed 003's table)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from equiport.compare.numbers import Number
from equiport.compare.verdict import Verdict
from equiport.experiment.atomic import write_json
from equiport.stages.downstream_scores import Item, MetricScores

if TYPE_CHECKING:
    from equiport.stages.stage7 import TaskRow

FILE_NAME = "differences.json"
_REASONING = (
    "gsm",
    "math",
    "arith",
    "mathqa",
    "asdiv",
    "svamp",
    "aime",
    "reason",
    "bbh",
    "logiqa",
    "humaneval",
    "mbpp",
)


class Difference(BaseModel):
    """An item that one side got right and the other wrong. Margins: the best choice's lead over the next, in nats."""

    task: str
    metric: str
    item: str
    text: str
    target: str
    port_score: Number
    source_score: Number
    port_margin: Number | None
    source_margin: Number | None
    port_answers: list[object]
    source_answers: list[object]


def diagnose(
    rows: Sequence[TaskRow],
    ours: Mapping[str, Sequence[MetricScores]],
    theirs: Mapping[str, Sequence[MetricScores]],
    output: Path,
) -> list[str]:
    """Write `output`/differences.json; returns lines for the screen: how many, how close, what to do."""
    found: list[Difference] = []
    for suite, metrics in ours.items():
        partners = {(other.task, other.metric, other.filter): other for other in theirs.get(suite, [])}
        for mine in metrics:
            other = partners.get((mine.task, mine.metric, mine.filter))
            if other is None:
                continue
            found += [
                _difference(mine, place, item, other.items[place])
                for place, item in mine.items.items()
                if place in other.items and item.score != other.items[place].score
            ]
    write_json(output / FILE_NAME, [item for item in found])
    margins = sorted(item.source_margin for item in found if item.source_margin is not None)
    lines = [f"{len(found)} items differ, listed in {output.name}/{FILE_NAME}"]
    if margins:
        lines[0] += (
            f"; the source's own lead there: median {margins[len(margins) // 2]:.3f}, most {margins[-1]:.3f} nats"
        )
    return [*lines, *_advice(rows)]


def _advice(rows: Sequence[TaskRow]) -> list[str]:
    failed = {row.task for row in rows if row.verdict is Verdict.FAIL}
    passed = {row.task for row in rows} - failed
    if not failed:
        return []
    if not passed:
        return ["all tasks fail: a fundamental fault of the port; back to stage 2"]
    if all(any(word in task.lower() for word in _REASONING) for task in failed):
        return ["reasoning fails and knowledge passes: a computation sensitive to precision; back to stage 4"]
    return [
        f"{', '.join(sorted(failed))} fail, {', '.join(sorted(passed))} pass: look at the listed items, then stage 4"
    ]


def _difference(mine: MetricScores, place: str, item: Item, other: Item) -> Difference:
    return Difference(
        task=mine.task,
        metric=mine.metric,
        item=place,
        text=item.text,
        target=item.target,
        port_score=_float(item.score),
        source_score=_float(other.score),
        port_margin=_margin(item),
        source_margin=_margin(other),
        port_answers=item.answers,
        source_answers=other.answers,
    )


def _float(score: float | None) -> float:
    return float("nan") if score is None else score


def _margin(item: Item) -> float | None:
    """None for generated texts."""
    try:
        values = sorted((float(answer[0]) for answer in item.answers), reverse=True)
    except (TypeError, ValueError, IndexError):
        return None
    return values[0] - values[1] if len(values) > 1 and all(map(isfinite, values)) else None
