"""Logits pooled over prompts: right answers, and the ways in which logits fool a comparator."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from equiport.compare import (
    ComparisonError,
    GateResult,
    LogitComparison,
    Thresholds,
    Verdict,
    compare_logits,
    end_to_end_gate,
)
from equiport.compare.gates_end_to_end import distribution_limits
from equiport.errors import EquiportError

ROWS, VOCABULARY = 80, 500
PROMPTS = [row // 8 for row in range(ROWS)]


def logits(seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def noisy(values: torch.Tensor, seed: int, scale: float = 0.01) -> torch.Tensor:
    """Logits with a small independent error and, as real ones have, a common offset."""
    generator = torch.Generator().manual_seed(seed)
    offset = 3 * scale * torch.randn(len(values), 1, generator=generator)
    return values + scale * torch.randn(values.shape, generator=generator) + offset


def compare(target: torch.Tensor, **more: torch.Tensor) -> LogitComparison:
    ref = logits()
    return compare_logits(ref, noisy(ref, 1), target, prompt_index=PROMPTS, **more)


def judged(found: LogitComparison) -> tuple[Verdict, set[str]]:
    result: GateResult = end_to_end_gate(found, Thresholds())
    return result.verdict, {item.code for item in result.reasons}


def test_a_correct_port_passes() -> None:
    found = compare(noisy(logits(), 2), target_fp32=logits() * (1 + 1e-8))
    result = end_to_end_gate(found, Thresholds())
    assert result.verdict is Verdict.PASS and result.blind_spots == ()
    assert [note.code for note in result.notes] == ["NOT_CALIBRATED"]
    assert 0.9 < found.r_centred < 1.1 and found.prompts == 10
    bare = end_to_end_gate(compare(noisy(logits(), 2)), Thresholds())
    assert bare.verdict is Verdict.PASS and [item.code for item in bare.blind_spots] == ["NO_FP32_EVIDENCE"]
    assert LogitComparison.model_validate_json(found.model_dump_json()) == found


def test_agrees_with_plain_formulas() -> None:
    ref, target = logits().double(), noisy(logits(), 2).double()
    base = noisy(logits(), 1).double()
    found = compare(noisy(logits(), 2))
    r, b, t = (x - x.mean(dim=1, keepdim=True) for x in (ref, base, target))
    assert found.r_centred == pytest.approx(float((t - r).norm() / (b - r).norm()), rel=1e-6)
    assert found.r_raw == pytest.approx(float((target - ref).norm() / (base - ref).norm()), rel=1e-6)
    quantile = [np.quantile((x - r).norm(dim=1).numpy(), 0.95) for x in (t, b)]
    assert found.p95_ratio == pytest.approx(quantile[0] / quantile[1], rel=1e-6)
    kl = torch.nn.functional.kl_div(target.log_softmax(1), ref.log_softmax(1), log_target=True, reduction="none").sum(1)
    assert found.kl.mean == pytest.approx(float(kl.mean()), rel=1e-6)
    assert found.kl.p95 == pytest.approx(float(np.quantile(kl.numpy(), 0.95)), rel=1e-6)
    assert found.top1 == pytest.approx(float((target.argmax(1) == ref.argmax(1)).double().mean()))
    cosine = torch.nn.functional.cosine_similarity(t, r, dim=1)
    assert found.cosine_centred.low == pytest.approx(float(cosine.min()), rel=1e-9)
    d = ((t - r).abs().amax(1) / ref.abs().amax(1)).max()
    assert found.tolerance_map["all"].max_observed == pytest.approx(float(d), rel=1e-6)
    assert list(found.tolerance_map) == ["k5", "k50", "k1000", "all"]
    assert found.tolerance_map["k5"].max_observed <= found.tolerance_map["all"].max_observed * 5


def test_chunks_change_nothing() -> None:
    ref, target = logits(), noisy(logits(), 2)
    whole = compare_logits(ref, noisy(ref, 1), target)
    parts = compare_logits(ref, noisy(ref, 1), target, chunk_elements=3 * VOCABULARY)
    assert parts.r_centred == pytest.approx(whole.r_centred, rel=1e-12)
    assert parts.kl.p999 == pytest.approx(whole.kl.p999, rel=1e-9) and parts.columns.top1 == whole.columns.top1


def test_unrelated_logits_that_share_a_mean_offset_fail() -> None:
    ref, other = logits() + 20, logits(9) + 20
    found = compare_logits(ref, noisy(ref, 1), other, prompt_index=PROMPTS)
    assert found.cosine_raw.p5 > 0.95 and found.cosine_centred.p95 < 0.2
    got, codes = judged(found)
    assert got is Verdict.FAIL and {"COSINE_P5", "R_CENTRED", "KL_P95", "TOP1"} <= codes


def test_a_scaling_of_logits_fails_though_cosine_and_top1_are_perfect() -> None:
    found = compare(1.05 * logits())
    assert found.cosine_centred.low > 0.9999 and found.top1 == 1.0
    got, codes = judged(found)
    assert got is Verdict.FAIL and {"R_CENTRED", "P95_RATIO"} <= codes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", ["target", "target_fp32"])
def test_nan_fails_and_never_becomes_0(value: float, role: str) -> None:
    tensors = {"target": noisy(logits(), 2), "target_fp32": logits().clone()}
    tensors[role][3, 7] = value
    found = compare(**tensors)
    got, codes = judged(found)
    assert got is Verdict.FAIL and "NON_FINITE_METRIC" in codes
    if role == "target":
        assert found.kl.p95 != found.kl.p95 and found.r_centred != found.r_centred and {"KL_P95", "R_CENTRED"} <= codes
    else:
        assert found.r32 is not None and not math.isfinite(found.r32) and "R32_POOLED" in codes


def test_nan_in_all_tensors_is_no_evidence_either() -> None:
    ref = logits()
    base, target = noisy(ref, 1), noisy(ref, 2)
    for tensor in (ref, base, target):
        tensor[0] = float("nan")
    assert judged(compare_logits(ref, base, target, prompt_index=PROMPTS))[0] is Verdict.FAIL


def test_suppressed_tokens_are_set_aside_where_all_agree() -> None:
    ref, base, target = logits(), noisy(logits(), 1), noisy(logits(), 2)
    for tensor in (ref, base, target):
        tensor[:, -5:] = -torch.inf
    found = compare_logits(ref, base, target, prompt_index=PROMPTS)
    assert found.masked == 5 * ROWS and found.kl.high < 0.01 and judged(found)[0] is Verdict.PASS
    target[0, 0] = -torch.inf
    got, codes = judged(compare_logits(ref, base, target, prompt_index=PROMPTS))
    assert got is Verdict.FAIL and "NAN_MASK" in codes


def test_constant_logits_fail() -> None:
    got, codes = judged(compare(torch.full((ROWS, VOCABULARY), 2.0)))
    assert got is Verdict.FAIL and "COSINE_P5" in codes
    flat = torch.ones(ROWS, VOCABULARY)
    got, codes = judged(compare_logits(flat, flat.clone(), flat.clone(), prompt_index=PROMPTS))
    assert got is Verdict.FAIL and "DEGENERATE_REFERENCE" in codes


def test_one_bad_position_is_seen_in_fp32() -> None:
    fp32 = logits()
    fp32[33] = fp32[33].roll(1)
    found = compare(noisy(logits(), 2), target_fp32=fp32)
    got, codes = judged(found)
    assert got is Verdict.FAIL and "R32_SLICE" in codes and found.r32_worst_position == 33


def test_fewer_than_ten_prompts_are_inconclusive() -> None:
    ref = logits()
    found = compare_logits(ref, noisy(ref, 1), noisy(ref, 2))
    assert judged(found) == (Verdict.INCONCLUSIVE, {"TOO_FEW_PROMPTS"})


def test_a_garbage_baseline_is_inconclusive_at_best() -> None:
    ref = logits()
    found = compare_logits(ref, logits(5), noisy(ref, 2), prompt_index=PROMPTS)
    assert judged(found) == (Verdict.INCONCLUSIVE, {"BASELINE_NOISE"})


def test_the_same_memory_fails() -> None:
    ref = logits()
    base = noisy(ref, 1)
    got, codes = judged(compare_logits(ref, base, base, prompt_index=PROMPTS))
    assert got is Verdict.FAIL and codes == {"SAME_TENSOR"}


def test_shapes_and_labels_are_checked() -> None:
    ref = logits()
    for bad in (ref[:-1], ref[:, :-1], ref[None]):
        with pytest.raises(ComparisonError, match="shapes differ"):
            compare_logits(ref, ref.clone(), bad)
    with pytest.raises(ComparisonError, match=r"\[N, V\]"):
        compare_logits(ref[None], ref[None].clone(), ref[None].clone())
    with pytest.raises(ComparisonError, match="no logits"):
        compare_logits(ref[:0], ref[:0].clone(), ref[:0].clone())
    with pytest.raises(EquiportError, match="positions"):
        compare_logits(ref, ref.clone(), ref.clone(), positions=[1, 2])
    with pytest.raises(EquiportError, match="prompt_index"):
        compare_logits(ref, ref.clone(), ref.clone(), prompt_index=torch.zeros(3))


def noisy_model(target_seed: int, scale: float = 0.5, *, fp32: bool = True) -> LogitComparison:
    """A source whose own bf16 misses θ and δ, and a port that is as far away."""
    ref = logits()
    more = {"target_fp32": ref * (1 + 1e-8)} if fp32 else {}
    return compare_logits(ref, noisy(ref, 1, 0.5), noisy(ref, target_seed, scale), prompt_index=PROMPTS, **more)


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_source_that_misses_the_limits_in_bf16_sets_them(seed: int) -> None:
    found = noisy_model(seed)
    assert found.cosine_centred.p5 < Thresholds().theta and found.kl.p95 > Thresholds().delta
    result = end_to_end_gate(found, Thresholds())
    assert result.verdict is Verdict.PASS, result.reasons
    assert {item.code for item in result.blind_spots} == {"BASELINE_NOISE"}
    limits = distribution_limits(found, Thresholds())
    assert 0.95 <= limits.theta < found.cosine_baseline.p5 and limits.delta == pytest.approx(
        1.69 * found.kl_baseline.p95
    )


def test_without_fp32_evidence_such_a_source_leaves_it_open() -> None:
    result = end_to_end_gate(noisy_model(2, fp32=False), Thresholds())
    assert result.verdict is Verdict.INCONCLUSIVE and {item.code for item in result.reasons} == {"BASELINE_NOISE"}


def test_a_port_further_away_than_such_a_source_fails() -> None:
    got, codes = judged(noisy_model(2, 0.7))
    assert got is Verdict.FAIL and {"COSINE_P5", "KL_P95", "R_CENTRED"} <= codes


def test_moved_limits_below_the_documented_ones_leave_it_open() -> None:
    found = noisy_model(2)
    noise = found.cosine_baseline.model_copy(update={"p5": 0.9})
    far = found.model_copy(
        update={"cosine_baseline": noise, "cosine_centred": found.cosine_centred.model_copy(update={"p5": 0.92})}
    )
    assert judged(far) == (Verdict.INCONCLUSIVE, {"BASELINE_NOISE"})
    worse = far.model_copy(update={"cosine_centred": found.cosine_centred.model_copy(update={"p5": 0.8})})
    assert judged(worse) == (Verdict.FAIL, {"COSINE_P5"})
    guessing = found.model_copy(update={"top1": 0.45, "top1_baseline": 0.45})
    assert judged(guessing) == (Verdict.INCONCLUSIVE, {"BASELINE_NOISE"})


def test_a_broken_baseline_moves_nothing() -> None:
    found = noisy_model(2)
    noise = found.cosine_baseline
    broken = found.model_copy(update={"cosine_baseline": noise.model_copy(update={"p5": float("nan")})})
    fixed = Thresholds()
    for limits in (
        distribution_limits(broken, fixed),
        distribution_limits(found, fixed.model_copy(update={"own_noise": 0.0})),
        distribution_limits(found, fixed.model_copy(update={"calibrated": True})),
    ):
        assert (limits.theta, limits.delta, limits.top1, limits.moved) == (fixed.theta, fixed.delta, fixed.top1, ())
