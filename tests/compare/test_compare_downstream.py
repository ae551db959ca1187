"""The paired interval and the downstream gate: coverage, symmetry, honesty without disagreement."""

from __future__ import annotations

from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiport.compare.gates_downstream import PublishedScore, downstream_gate, published_gate
from equiport.compare.paired import PairedDifference, items_to_settle, paired_difference
from equiport.compare.verdict import Verdict


def pairs(both: int, better: int, worse: int, neither: int) -> PairedDifference:
    """Items that both sides, only the target, only the baseline, or none got right."""
    target = [1.0] * (both + better) + [0.0] * (worse + neither)
    baseline = [1.0] * both + [0.0] * better + [1.0] * worse + [0.0] * neither
    return paired_difference(target, baseline)


counts = st.integers(0, 400)


@given(counts, counts, counts, counts)
def test_the_interval_holds_the_difference_and_turns_with_the_sides(both: int, more: int, less: int, none: int) -> None:
    if both + more + less + none == 0:
        return
    found, turned = pairs(both, more, less, none), pairs(both, less, more, none)
    assert -1 <= found.low < found.high <= 1
    assert found.low <= found.difference + 1e-12 and found.difference <= found.high + 1e-12
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    assert (found.better, found.worse) == (more, less)


@given(st.integers(1, 3000))
def test_no_disagreement_is_no_certainty(count: int) -> None:
    """The rule of three: with no event in n items a rate of 3/n cannot be excluded."""
    found = pairs(count, 0, 0, 0)
    assert found.difference == 0 and 2.0 / (count + 2) < found.half_width < 3.0 / count


@given(st.integers(1, 40), st.integers(0, 6), st.integers(0, 6))
def test_more_items_of_the_same_kind_narrow_it_and_settle(scale: int, more: int, less: int) -> None:
    small, large = pairs(60, more, less, 10), pairs(600 * scale, 10 * scale * more, 10 * scale * less, 100 * scale)
    assert large.half_width < small.half_width
    needed = items_to_settle(small, 0.02)
    times = -(-needed // small.items)
    assert needed > small.items and pairs(60 * times, more * times, less * times, 10 * times).half_width <= 0.0202


@pytest.mark.parametrize(
    ("count", "gain", "loss"), [(40, 0.05, 0.05), (60, 0.02, 0.10), (50, 0.2, 0.1), (80, 0.01, 0.01)]
)
def test_it_covers_the_truth_as_often_as_it_says(count: int, gain: float, loss: float) -> None:
    """Summed over every outcome of `count` items; 95 % nominal."""
    covered = 0.0
    for more in range(count + 1):
        for less in range(count + 1 - more):
            chance = comb(count, more) * comb(count - more, less) * gain**more * loss**less
            chance *= (1 - gain - loss) ** (count - more - less)
            if chance > 1e-12:
                found = pairs(count - more - less, more, less, 0)
                covered += chance * (found.low <= gain - loss <= found.high)
    assert covered > 0.94


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=60))
def test_graded_scores(rows: list[tuple[float, float]]) -> None:
    found = paired_difference([row[0] for row in rows], [row[1] for row in rows])
    assert found.low <= found.difference + 1e-9 and found.difference <= found.high + 1e-9
    assert found.half_width > 0
    same = paired_difference([row[0] for row in rows], [row[0] for row in rows])
    assert same.difference == 0 and same.half_width > 1 / (len(rows) + 2)


@pytest.mark.parametrize("bad", [([], []), ([1.0], [1.0, 0.0]), ([float("nan")], [1.0]), ([1.0], [2.0])])
def test_what_is_no_pair_of_scores_is_refused(bad: tuple[list[float], list[float]]) -> None:
    with pytest.raises(ValueError):
        paired_difference(*bad)


@pytest.mark.parametrize(
    ("found", "chance", "verdict", "code"),
    [
        (pairs(560, 5, 5, 30), 0.25, Verdict.PASS, None),
        (pairs(500, 0, 60, 40), 0.25, Verdict.FAIL, "DOWNSTREAM_REGRESSION"),
        (pairs(90, 0, 0, 10), 0.25, Verdict.INCONCLUSIVE, "TOO_FEW_ITEMS"),
        (pairs(900, 0, 28, 72), 0.25, Verdict.INCONCLUSIVE, "TOO_FEW_ITEMS"),
        (pairs(300, 0, 0, 300), 0.5, Verdict.INCONCLUSIVE, "BASELINE_AT_CHANCE"),
        (pairs(5, 0, 0, 595), 0.0, Verdict.INCONCLUSIVE, "BASELINE_AT_CHANCE"),
        (pairs(0, 0, 0, 600), 0.25, Verdict.INCONCLUSIVE, "BASELINE_AT_CHANCE"),
    ],
)
def test_the_gate(found: PairedDifference, chance: float, verdict: Verdict, code: str | None) -> None:
    result = downstream_gate(found, 0.02, chance, "task")
    assert result.verdict is verdict
    assert [item.code for item in result.reasons] == ([code] if code else [])


@given(counts, counts, counts, counts, st.floats(0.005, 0.2))
def test_a_pass_is_narrow_and_no_regression(both: int, more: int, less: int, none: int, tolerance: float) -> None:
    if both + more + less + none == 0:
        return
    found = pairs(both, more, less, none)
    result = downstream_gate(found, tolerance, 0.25)
    if result.verdict is Verdict.PASS:
        assert found.half_width <= tolerance and found.difference >= -tolerance
    if result.verdict is Verdict.FAIL:
        assert found.high < -tolerance
    else:
        assert found.high >= -tolerance


def test_published_scores() -> None:
    published = PublishedScore(gpu_mean=0.8, stderr=0.01)
    assert published.limit == pytest.approx(0.78)
    assert published_gate(0.79, 2000, published).verdict is Verdict.PASS
    assert published_gate(0.77, 2000, published).verdict is Verdict.FAIL
    assert published_gate(0.79, 50, published).verdict is Verdict.INCONCLUSIVE
    assert published_gate(1.0, 3, published).verdict is Verdict.INCONCLUSIVE
    assert published_gate(float("nan"), 2000, published).verdict is Verdict.FAIL
