"""Figures and gates of embeddings on drawn vectors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equiport.compare.embedding_thresholds import EmbeddingThresholds, load_embedding_thresholds
from equiport.compare.embeddings import EmbeddingComparison, EmbeddingTensors, compare_embeddings, distance
from equiport.compare.gates import GateResult
from equiport.compare.gates_embeddings import embedding_gate
from equiport.compare.verdict import Verdict

ROWS, WIDTH = 10, 96
LABELS = [str(number) for number in range(ROWS)]


def drawn(seed: int = 0, *, lean: float = 0.0, noise: float = 3e-3, error: float = 3e-3) -> EmbeddingTensors:
    """Vectors whose rounding errors are independent: a right bf16 target, alone, batched and swapped."""
    generator = torch.Generator().manual_seed(seed)

    def near(rows: Tensor, size: float) -> Tensor:
        return rows + size * torch.randn(rows.shape, generator=generator) * rows.norm(dim=1, keepdim=True) / WIDTH**0.5

    exact = torch.randn(ROWS, WIDTH, generator=generator) + lean * torch.randn(WIDTH, generator=generator)
    target = near(exact, error)
    return EmbeddingTensors(
        target, near(exact, noise), exact, target.clone(), target.clone(), (True,) * ROWS, 0.0, True
    )


def gate(vectors: EmbeddingTensors) -> GateResult:
    return embedding_gate(compare_embeddings(vectors, LABELS), EmbeddingThresholds())


def codes(result: GateResult) -> set[str]:
    return {item.code for item in result.reasons}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 3.0, 8.0]))
def test_right_targets_pass_however_far_they_lean(seed: int, lean: float) -> None:
    result = gate(drawn(seed, lean=lean))
    assert result.verdict is Verdict.PASS, result.reasons


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["target", "batched", "swapped"]),
    st.integers(0, ROWS - 1),
    st.sampled_from([float("nan"), float("inf"), 0.0]),
)
def test_what_is_no_vector_never_passes(seed: int, field: str, row: int, value: float) -> None:
    vectors = drawn(seed)
    spoilt = getattr(vectors, field).clone()
    spoilt[row] = value
    result = gate(replace(vectors, **{field: spoilt}))
    assert result.verdict is Verdict.FAIL
    assert codes(result) == {"DEGENERATE_TARGET" if value == 0 else "NON_FINITE_METRIC"}
    assert result.reasons[0].subject == str(row)


@pytest.mark.parametrize("lean", [0.0, 3.0, 8.0, 20.0])
def test_one_vector_for_all_never_passes(lean: float) -> None:
    vectors = drawn(lean=lean)
    one = vectors.ref_fp32.mean(dim=0, keepdim=True).repeat(ROWS, 1)
    result = gate(replace(vectors, target=one, batched=one, swapped=one))
    assert result.verdict is Verdict.FAIL and "COLLAPSED" in codes(result)


def test_a_reference_without_spread_is_inconclusive_at_best() -> None:
    result = gate(drawn(lean=60.0, noise=1e-4, error=1e-4))
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"REFERENCE_COLLAPSED"}
    noisy = gate(drawn(lean=12.0, noise=2.5e-2, error=2.5e-2))
    assert noisy.verdict is Verdict.INCONCLUSIVE and "REFERENCE_COLLAPSED" in codes(noisy)


def test_rows_of_other_prompts_are_confused() -> None:
    vectors = drawn(lean=8.0)
    other = vectors.target.roll(1, 0)
    result = gate(replace(vectors, target=other, batched=other, swapped=other))
    assert result.verdict is Verdict.FAIL and "CONFUSED" in codes(result) and "COLLAPSED" not in codes(result)


def test_an_error_of_the_size_of_the_spread() -> None:
    """Each prompt is nearest to its own reference still, by little."""
    vectors = drawn(lean=8.0, error=0.08)
    found = compare_embeddings(vectors, LABELS)
    assert [row.nearest for row in found.prompts] == list(range(ROWS))
    result = embedding_gate(found, EmbeddingThresholds())
    assert result.verdict is Verdict.FAIL and "CONFUSED" in codes(result), result.reasons


def test_a_noisy_reference_excuses_nothing_but_noise() -> None:
    """bf16 that reaches 0.998 only: a target as noisy is inconclusive, one of twenty times the noise fails."""
    assert codes(gate(drawn(noise=0.06, error=0.06))) == {"BASELINE_NOISE"}
    assert gate(drawn(noise=0.06, error=0.06)).verdict is Verdict.INCONCLUSIVE
    assert "EMBEDDING_COSINE" in codes(gate(drawn(noise=0.06, error=0.4)))


@pytest.mark.parametrize(
    ("leak", "noise", "verdict"),
    [
        (1e-4, 0.0, Verdict.PASS),
        (3e-3, 0.0, Verdict.INCONCLUSIVE),
        (3e-3, 1e-5, Verdict.PASS),
        (3e-2, 1.0, Verdict.FAIL),
    ],
)
def test_leaks_by_size(leak: float, noise: float, verdict: Verdict) -> None:
    """The source's own batch noise widens the limit, up to 1e-4 and no further."""
    vectors = drawn()
    moved = vectors.target + leak * vectors.target.roll(1, 0)
    result = gate(replace(vectors, batched=moved, swapped=moved, batch_noise=noise))
    assert result.verdict is verdict, result.reasons
    assert verdict is Verdict.PASS or codes(result) == {"BATCH_DEPENDENT"}


def test_other_neighbours() -> None:
    vectors = drawn()
    result = gate(replace(vectors, swapped=vectors.target + 0.03 * vectors.target.roll(1, 0)))
    assert result.verdict is Verdict.FAIL and codes(result) == {"NEIGHBOUR_LEAK"}
    result = gate(replace(vectors, swapped=None))
    assert result.verdict is Verdict.PASS and [item.code for item in result.blind_spots] == ["NOT_BATCHED"]


def test_few_prompts_and_none() -> None:
    vectors = drawn()
    few = EmbeddingTensors(
        *(
            rows[:4]
            for rows in (vectors.target, vectors.ref_bf16, vectors.ref_fp32, vectors.batched)
            if rows is not None
        ),
        padded=True,
    )
    assert codes(embedding_gate(compare_embeddings(few, LABELS[:4]), EmbeddingThresholds())) == {"TOO_FEW_PROMPTS"}
    empty = EmbeddingComparison(precision="bf16", width=8)
    assert embedding_gate(empty, EmbeddingThresholds()).verdict not in (Verdict.PASS, Verdict.INCONCLUSIVE)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-150, 1e150), st.floats(1e-8, 1e-3))
def test_distances_are_exact_at_any_scale(scale: float, angle: float) -> None:
    left = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, angle]], dtype=torch.float64) * scale
    assert float(distance(left, right)) == pytest.approx(angle**2 / 2, rel=1e-5)


def test_lengths() -> None:
    vectors = drawn()
    for factor, verdict in ((1.004, Verdict.PASS), (1.2, Verdict.FAIL)):
        longer = factor * vectors.target
        result = gate(replace(vectors, target=longer, batched=longer, swapped=longer))
        assert result.verdict is verdict
        assert codes(result) <= {"EMBEDDING_NORM"}


def test_thresholds_are_a_file(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "limits.json"  # type: ignore[operator]
    EmbeddingThresholds(cosine=0.9995).save(file)
    assert load_embedding_thresholds(file) == EmbeddingThresholds(cosine=0.9995)
    assert EmbeddingThresholds(cosine=0.9995) != EmbeddingThresholds()
