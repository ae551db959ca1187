"""Metrics against plain formulas, and the laws they obey."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equiport.compare import Comparison, Labels, compare_3tensors
from equiport.compare.streams import blocks

LAWS = settings(max_examples=25, deadline=None)
SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**31)


def triple(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A reference, its bf16 version, a noisy bf16 target and an fp32 target."""
    generator = torch.Generator().manual_seed(seed)
    ref = torch.randn(shape, generator=generator) + 0.1
    noise = torch.randn(shape, generator=generator)
    return ref, ref.to(torch.bfloat16), (ref * (1 + 0.01 * noise)).to(torch.bfloat16), ref * (1 + 1e-6 * noise)


@LAWS
@given(SHAPES, SEEDS)
def test_agrees_with_plain_numpy(shape: tuple[int, ...], seed: int) -> None:
    ref, base, target, fp32 = triple(shape, seed)
    found = compare_3tensors(ref, base, target, target_fp32=fp32)
    r, b, t, f = (x.double().numpy() for x in (ref, base, target, fp32))
    if found.mode == "exact":
        assert np.linalg.norm(b - r) <= 1e-6 * np.linalg.norm(r)
        return
    norm = np.linalg.norm
    assert found.r_ratio == pytest.approx(norm(t - r) / (norm(b - r) + 1e-12 * norm(r)))
    assert found.r32 == pytest.approx(norm(f - r) / (norm(b - r) + 1e-12 * norm(r)))
    assert found.sigma_ratio == pytest.approx(np.sqrt(np.mean((t - r) ** 2)) / np.sqrt(np.mean((b - r) ** 2)))
    assert found.linf_ratio == pytest.approx(np.abs(t - r).max() / np.abs(b - r).max())
    assert found.cosine == pytest.approx(np.sum(t * r) / (norm(t) * norm(r)))
    assert found.nmse == pytest.approx(norm(t - r) ** 2 / norm(r) ** 2)
    low, high = min(np.abs(t - r).min(), np.abs(b - r).min()), max(np.abs(t - r).max(), np.abs(b - r).max())
    if high > low:
        p, q = (np.histogram(np.abs(x - r), 100, (low, high))[0] / (r.size + 1e-10) for x in (t, b))
        assert found.bc == pytest.approx(np.clip(np.sum(np.sqrt(p * q)), 0, 1), abs=0.02)


@LAWS
@given(SHAPES, SEEDS, st.integers(1, 50))
def test_chunk_size_changes_nothing(shape: tuple[int, ...], seed: int, chunk: int) -> None:
    ref, base, target, fp32 = triple(shape, seed)
    whole = compare_3tensors(ref, base, target, target_fp32=fp32)
    parts = compare_3tensors(ref, base, target, target_fp32=fp32, chunk_elements=chunk)
    assert parts.mode == whole.mode and parts.elements == whole.elements
    for name in ("r_ratio", "r32", "sigma_ratio", "bc", "linf_ratio", "cosine", "nmse", "mean_shift"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-12), name
    for ours, theirs in zip(parts.r_slices + parts.r32_slices, whole.r_slices + whole.r32_slices, strict=True):
        assert ours.ratio == pytest.approx(theirs.ratio, rel=1e-9)


@LAWS
@given(SHAPES, SEEDS, st.integers(-60, 20))
def test_ratios_do_not_change_with_the_scale(shape: tuple[int, ...], seed: int, power: int) -> None:
    tensors = [x.double() for x in triple(shape, seed)]
    plain = compare_3tensors(*tensors[:3], target_fp32=tensors[3])
    scaled_tensors = [x * 2.0**power for x in tensors]
    scaled = compare_3tensors(*scaled_tensors[:3], target_fp32=scaled_tensors[3])
    assert scaled.mode == plain.mode
    for name in ("r_ratio", "r32", "sigma_ratio", "bc", "linf_ratio", "cosine", "nmse"):
        assert getattr(scaled, name) == pytest.approx(getattr(plain, name), rel=1e-9), name


@LAWS
@given(st.integers(2, 40), st.integers(2, 6), SEEDS)
def test_order_of_elements_does_not_matter(rows: int, columns: int, seed: int) -> None:
    tensors = triple((rows, columns), seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    plain = compare_3tensors(*tensors[:3], target_fp32=tensors[3])
    mixed = compare_3tensors(*(x[order] for x in tensors[:3]), target_fp32=tensors[3][order])
    for name in ("r_ratio", "r32", "bc", "linf_ratio", "cosine"):
        assert getattr(mixed, name) == pytest.approx(getattr(plain, name), rel=1e-9)
    worst, moved = plain.r_slices[0], mixed.r_slices[0]
    assert moved.ratio == pytest.approx(worst.ratio, rel=1e-9)


@LAWS
@given(st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple), st.integers(1, 30))
def test_blocks_cover_every_element_once(shape: tuple[int, ...], chunk: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    order = []
    numbers = torch.arange(seen.numel()).reshape(shape)
    for index in blocks(shape, chunk):
        assert numbers[index].numel() <= chunk
        seen[index] += 1
        order.extend(numbers[index].flatten().tolist())
    assert bool((seen == 1).all())
    assert order == sorted(order)


def test_one_bad_head_is_named() -> None:
    ref, base, _, _ = triple((2, 12, 64, 16), 0)
    fp32 = ref.clone()
    fp32[:, 7] *= 1.0005
    found = compare_3tensors(ref, base, base.clone(), target_fp32=fp32)
    worst = next(item for item in found.r32_slices if item.axis == 1)
    assert (worst.start, worst.stop) == (7, 8) and worst.label == "axis 1, index 7"
    assert worst.ratio > 0.1
    assert found.r32_slice is not None and found.r32_slice.axis == 1


def test_a_slice_with_an_exact_baseline_does_not_cry_wolf() -> None:
    ref, _, _, _ = triple((32, 64), 1)
    ref[0] = ref[0].to(torch.bfloat16).float()  # such as position 0 of a rotation
    base = ref.to(torch.bfloat16)
    fp32 = ref * (1 + 1e-7 * torch.randn(32, 64, generator=torch.Generator().manual_seed(2)))
    found = compare_3tensors(ref, base, base.clone(), target_fp32=fp32)
    assert found.r32_slice is not None and found.r32_slice.ratio < 5e-4
    fp32[0] *= 1.001  # and a fault in it is seen
    found = compare_3tensors(ref, base, base.clone(), target_fp32=fp32)
    assert found.r32_slice is not None and found.r32_slice.axis == 0 and found.r32_slice.start == 0
    assert found.r32_slice.floored and found.r32_slice.ratio > 0.1


@pytest.mark.parametrize("power", range(1, 13))
def test_correct_slices_of_any_width_stay_below_the_limit(power: int) -> None:
    generator = torch.Generator().manual_seed(power)
    ref = torch.randn(1 << (14 - power), 1 << power, generator=generator) * 3
    noise = torch.randn(ref.shape, generator=generator)
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=ref + 3 * 1.7e-3 * 8e-5 * noise)
    assert found.r32_slice is not None and found.r32_slice.ratio < 1e-3


def test_round_trip_keeps_nan_and_infinity() -> None:
    ref, base, target, _ = triple((3, 4), 3)
    found = compare_3tensors(
        ref, base, target, name="x", labels=Labels(component="mlp", layer=2, seed=1, phase="decode")
    )
    assert Comparison.from_json(found.to_json()) == found
    odd = found.model_copy(update={"r_ratio": float("inf"), "bc": float("nan")})
    again = Comparison.from_json(odd.to_json())
    assert again.r_ratio == float("inf") and again.bc != again.bc


def test_ratios_keep_float64_precision() -> None:
    torch.manual_seed(0)
    ref = torch.randn(200, 200)
    bf16, target = ref.to(torch.bfloat16), (ref + 1e-3 * torch.randn_like(ref)).to(torch.bfloat16)
    r, b, t = (tensor.double() for tensor in (ref, bf16, target))
    plain = float((t - r).norm() / ((b - r).norm() + 1e-12 * r.norm()))
    assert abs(compare_3tensors(ref, bf16, target).r_ratio / plain - 1) < 1e-10
