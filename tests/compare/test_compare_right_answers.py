"""The right answer to each input on which a comparator is known to pass wrongly or to cry wolf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equiport.compare import (
    ComparisonError,
    ReasonCode,
    Thresholds,
    Verdict,
    check_3tensor_result,
    compare_3tensors,
    judge,
)
from equiport.compare.comparison import Comparison
from equiport.errors import EquiportError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def verdict(found: Comparison) -> tuple[Verdict, set[str]]:
    result = judge(found, Thresholds())
    return result.verdict, {item.code for item in result.reasons}


@pytest.mark.parametrize("other", [(12, 4), (48,), (1, 4, 12), (4, 1), (4, 13), ()])
def test_another_shape_is_an_error_that_names_both(other: tuple[int, ...]) -> None:
    ref = normal(4, 12)
    with pytest.raises(ComparisonError, match=r"\[4, 12\].*" + str(list(other)).replace("[", r"\[")) as caught:
        compare_3tensors(ref, ref.bfloat16(), torch.ones(other), name="mlp")
    assert caught.value.code is ReasonCode.SHAPE_MISMATCH
    with pytest.raises(ComparisonError):
        compare_3tensors(ref, torch.ones(other), ref.bfloat16())
    with pytest.raises(ComparisonError):
        compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=torch.ones(other))


def test_a_size_1_tensor_right_and_wrong() -> None:
    ref = torch.tensor([1.2345])
    assert verdict(compare_3tensors(ref, ref.bfloat16(), ref.bfloat16()))[0] is Verdict.PASS
    assert verdict(compare_3tensors(ref, ref.bfloat16(), 2 * ref.bfloat16()))[0] is Verdict.FAIL
    near = compare_3tensors(ref, ref.bfloat16(), ref + 0.003)
    assert verdict(near) == (Verdict.INCONCLUSIVE, {"TOO_FEW_ELEMENTS"})
    lucky = torch.tensor([1.2345])  # the baseline hits the value by chance: R is 3000 and means nothing
    assert verdict(compare_3tensors(lucky, lucky + 1e-6, lucky + 0.003)) == (Verdict.INCONCLUSIVE, {"TOO_FEW_ELEMENTS"})
    assert verdict(compare_3tensors(lucky, lucky + 1e-6, lucky + 0.03))[0] is Verdict.FAIL
    fp32 = compare_3tensors(lucky, lucky + 1e-6, lucky + 1e-6, target_fp32=lucky + 2e-7)
    assert verdict(fp32) == (Verdict.INCONCLUSIVE, {"TOO_FEW_ELEMENTS"})
    fp32 = compare_3tensors(lucky, lucky + 1e-6, lucky + 1e-6, target_fp32=lucky + 1e-4)
    assert verdict(fp32) == (Verdict.FAIL, {"R32_POOLED"})
    scalar = torch.tensor(1.2345)
    assert verdict(compare_3tensors(scalar, scalar.bfloat16(), scalar.bfloat16()))[0] is Verdict.PASS
    assert verdict(compare_3tensors(scalar, scalar.bfloat16(), -scalar))[0] is Verdict.FAIL


def test_values_near_1e_minus_14_half_of_them_wrong() -> None:
    ref = normal(64, 64) * 1e-14
    target = ref.bfloat16()
    assert verdict(compare_3tensors(ref, ref.bfloat16(), target))[0] is Verdict.PASS
    wrong = target.clone()
    wrong[:, ::2] *= -1
    assert verdict(compare_3tensors(ref, ref.bfloat16(), wrong))[0] is Verdict.FAIL


def test_one_element_off_in_four_million() -> None:
    ref = normal(2000, 2000)
    wrong = ref.bfloat16()
    wrong[1234, 567] += 2.0
    found = compare_3tensors(ref, ref.bfloat16(), wrong)
    assert found.r_ratio < 1.2  # R alone does not see it
    assert verdict(found) == (Verdict.FAIL, {"LINF"})
    fp32 = ref.clone()
    fp32[1234, 567] += 2.0
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=fp32)
    assert verdict(found) == (Verdict.FAIL, {"R32_POOLED", "R32_SLICE"})


def test_identical_inf_masks_are_set_aside() -> None:
    ref = normal(16, 16).masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=ref.clone())
    assert found.set_aside.neg_inf == 120 and found.elements == 136
    assert verdict(found)[0] is Verdict.PASS
    wrong = ref.bfloat16().clone()
    wrong[3, 1] += 1.0
    assert verdict(compare_3tensors(ref, ref.bfloat16(), wrong))[0] is Verdict.FAIL


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.3e38])
@pytest.mark.parametrize("role", ["target", "ref_bf16", "ref_fp32", "target_fp32"])
def test_different_masks_fail(value: float, role: str) -> None:
    tensors = {"ref_fp32": normal(8, 8), "ref_bf16": normal(8, 8).bfloat16(), "target": normal(8, 8).bfloat16()}
    tensors["target_fp32"] = normal(8, 8)
    tensors[role][2, 2] = value
    found = compare_3tensors(**tensors)
    got, codes = verdict(found)
    assert got is Verdict.FAIL and "NAN_MASK" in codes


def test_nan_at_other_places_and_other_kinds_fail() -> None:
    ref, base = normal(8, 8), normal(8, 8).bfloat16()
    ref[0, 0] = base[0, 0] = float("nan")
    elsewhere, kind = normal(8, 8).bfloat16(), base.clone()
    elsewhere[0, 1] = float("nan")
    kind[0, 0] = -torch.inf
    assert verdict(compare_3tensors(ref, base, elsewhere))[0] is Verdict.FAIL
    assert verdict(compare_3tensors(ref, base, kind))[0] is Verdict.FAIL
    assert verdict(compare_3tensors(ref, base, base.clone()))[0] is Verdict.PASS


def test_nothing_but_nan_is_no_pass() -> None:
    ref = torch.full((4, 4), float("nan"))
    got, codes = verdict(compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=ref.clone()))
    assert got is Verdict.FAIL and "EMPTY" in codes


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 3)])
def test_an_empty_tensor_fails(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    found = compare_3tensors(empty, empty.bfloat16(), torch.zeros(shape), target_fp32=torch.zeros(shape))
    got, codes = verdict(found)
    assert got is Verdict.FAIL and "EMPTY" in codes


def test_exact_and_inexact_lookups() -> None:
    table = normal(50, 16).bfloat16()
    ids = torch.arange(20)
    rows = table[ids]
    good = compare_3tensors(rows.float(), rows, table[ids], target_fp32=table.float()[ids])
    result = judge(good, Thresholds())
    assert good.mode == "exact" and result.verdict is Verdict.PASS
    assert [note.code for note in result.notes] == ["EXACT_EQUAL"]
    wrong_ids = ids.clone()
    wrong_ids[7] = 8
    bad = compare_3tensors(rows.float(), rows, table[wrong_ids])
    assert verdict(bad) == (Verdict.FAIL, {"EXACT_MISMATCH"})
    one_ulp = rows.clone()
    one_ulp.view(torch.int16)[3, 3] += 1
    assert verdict(compare_3tensors(rows.float(), rows, one_ulp)) == (Verdict.FAIL, {"EXACT_MISMATCH"})
    fp32_bad = compare_3tensors(rows.float(), rows, rows.clone(), target_fp32=table.float()[wrong_ids])
    got, codes = verdict(fp32_bad)
    assert got is Verdict.FAIL and codes == {"R32_POOLED", "R32_SLICE"}


def test_an_ulp_is_allowed_only_where_the_reduction_order_may_differ() -> None:
    values = normal(64, 64).bfloat16()
    one_ulp = values.clone()
    one_ulp.view(torch.int16)[3, 3] += 1
    split = compare_3tensors(values.float(), values, one_ulp, baseline="split:4")
    result = judge(split, Thresholds())
    assert result.verdict is Verdict.PASS and [note.code for note in result.notes] == ["EXACT_ULP"]
    one_ulp.view(torch.int16)[3, 3] += 1
    assert verdict(compare_3tensors(values.float(), values, one_ulp, baseline="split:4"))[0] is Verdict.FAIL


def test_fp32_lookups_with_a_rounded_baseline_see_one_wrong_row() -> None:
    table = normal(500, 64)
    ids = torch.arange(100)
    ref = table[ids]
    assert verdict(compare_3tensors(ref, ref.bfloat16(), table.bfloat16()[ids]))[0] is Verdict.PASS
    ids[50] = 51
    assert verdict(compare_3tensors(ref, ref.bfloat16(), table.bfloat16()[ids]))[0] is Verdict.FAIL


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
    ],
)
def test_any_real_dtype_is_accepted(dtype: torch.dtype) -> None:
    ref = (normal(16, 16) > 0) if dtype is torch.bool else (normal(16, 16).clamp(-2, 2) * 8).to(dtype)
    found = compare_3tensors(ref, ref.clone(), ref.clone())
    assert verdict(found)[0] is Verdict.PASS and found.dtypes["target"] == str(dtype).removeprefix("torch.")
    wrong = ref.clone()
    wrong[0] = wrong[1]
    assert verdict(compare_3tensors(ref, ref.clone(), wrong))[0] is Verdict.FAIL


def test_bf16_inputs_without_a_cast_and_numpy() -> None:
    ref = normal(32, 32)
    plain = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16())
    cast = compare_3tensors(ref, ref.bfloat16().float(), ref.bfloat16().float())
    assert plain.r_ratio == cast.r_ratio == pytest.approx(1.0)
    arrays = compare_3tensors(ref.numpy(), ref.bfloat16().float().numpy().copy(), np.array(ref.bfloat16().float()))
    assert arrays.r_ratio == plain.r_ratio


def test_large_integers_are_compared_exactly() -> None:
    ref = torch.arange(2**53, 2**53 + 64)
    assert verdict(compare_3tensors(ref, ref.clone(), ref.clone()))[0] is Verdict.PASS
    wrong = ref.clone()
    wrong[0] += 1  # the same number in float64
    assert verdict(compare_3tensors(ref, ref.clone(), wrong)) == (Verdict.FAIL, {"EXACT_MISMATCH"})


def test_integers_on_which_the_references_disagree_are_inconclusive() -> None:
    ref = torch.arange(64)
    base, target = ref.clone(), ref.clone()
    base[3], target[4] = 9, 7
    assert verdict(compare_3tensors(ref, base, target)) == (Verdict.INCONCLUSIVE, {"INTEGER_NOISE"})


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_a_constant_target_is_degenerate(value: float) -> None:
    ref = normal(16, 16)
    got, codes = verdict(compare_3tensors(ref, ref.bfloat16(), torch.full((16, 16), value)))
    assert got is Verdict.FAIL and "DEGENERATE_TARGET" in codes
    tiny = ref * 1e-46  # fp32 denormals round to zero in both: R is 1, and says nothing
    ref64 = normal(16, 16).double() * 1e-60
    got, codes = verdict(compare_3tensors(ref64, ref64.float(), ref64.float()))
    assert got is Verdict.FAIL and "DEGENERATE_TARGET" in codes
    assert verdict(compare_3tensors(tiny, tiny.clone(), tiny.clone()))[0] is not Verdict.PASS


def test_a_constant_reference_cannot_show_a_fault() -> None:
    zeros = torch.zeros(16, 16)
    assert verdict(compare_3tensors(zeros, zeros.bfloat16(), zeros.clone())) == (
        Verdict.INCONCLUSIVE,
        {"DEGENERATE_REFERENCE"},
    )
    got, _ = verdict(compare_3tensors(zeros, zeros.bfloat16(), normal(16, 16)))
    assert got is Verdict.FAIL


def test_masks_of_fill_values() -> None:
    causal = torch.ones(16, 16).triu(1).bool()
    fp32 = torch.zeros(16, 16).masked_fill(causal, torch.finfo(torch.float32).min)
    bf16 = torch.zeros(16, 16).bfloat16().masked_fill(causal, torch.finfo(torch.bfloat16).min)
    found = compare_3tensors(fp32, bf16, bf16.clone(), target_fp32=fp32.clone())
    assert found.set_aside.fill == 120 and verdict(found)[0] is Verdict.PASS
    window = torch.zeros(16, 16).bfloat16().masked_fill(causal.roll(1, 1), torch.finfo(torch.bfloat16).min)
    got, codes = verdict(compare_3tensors(fp32, bf16, window))
    assert got is Verdict.FAIL and "NAN_MASK" in codes
    got, _ = verdict(compare_3tensors(fp32, bf16, bf16.masked_fill(causal, -torch.inf)))
    assert got is Verdict.FAIL


@pytest.mark.parametrize("fill", [-1e4, -1e9, -3.3e38])
def test_a_position_bias_beside_mask_fills_is_not_hidden(fill: float) -> None:
    distance = (torch.arange(64)[None, :] - torch.arange(64)[:, None]).float()
    causal = distance > 0
    fp32 = (0.3 * distance).masked_fill(causal, fill)
    bf16 = (0.3 * distance).bfloat16().masked_fill(causal, fill)
    right = compare_3tensors(fp32, bf16, bf16.clone(), target_fp32=fp32.clone())
    assert verdict(right)[0] is Verdict.PASS
    dropped = torch.zeros(64, 64).masked_fill(causal, fill)
    found = compare_3tensors(fp32, bf16, bf16.clone(), target_fp32=dropped)
    assert verdict(found)[0] is Verdict.FAIL
    if fill < -1e8:
        assert found.set_aside.fill == 2016
        assert verdict(compare_3tensors(fp32, bf16, dropped.bfloat16()))[0] is Verdict.FAIL
        other = compare_3tensors(fp32, bf16, bf16.masked_fill(causal, fill / 10))
        assert verdict(other)[0] is Verdict.FAIL  # another fill is not silently the same mask


def test_the_same_memory_twice_fails() -> None:
    ref = normal(16, 16)
    base = ref.bfloat16()
    for tensors in (
        {"ref_fp32": ref, "ref_bf16": base, "target": base},
        {"ref_fp32": ref, "ref_bf16": base, "target": ref},
        {"ref_fp32": ref, "ref_bf16": base, "target": base.view(16, 16)},
        {"ref_fp32": ref, "ref_bf16": ref.detach(), "target": base},
        {"ref_fp32": ref, "ref_bf16": base, "target": base.clone(), "target_fp32": ref},
    ):
        got, codes = verdict(compare_3tensors(**tensors))
        assert got is Verdict.FAIL and "SAME_TENSOR" in codes


def test_swapped_references_fail() -> None:
    ref = normal(16, 16)
    got, codes = verdict(compare_3tensors(ref.bfloat16().float(), ref, ref.bfloat16().float()))
    assert got is Verdict.FAIL and "REFERENCES_SWAPPED" in codes


def test_a_garbage_baseline_hides_nothing() -> None:
    ref = normal(64, 64)
    garbage, wrong = normal(64, 64, seed=1).bfloat16(), normal(64, 64, seed=2).bfloat16()
    found = compare_3tensors(ref, garbage, wrong)
    assert found.r_ratio < 1.2
    assert verdict(found) == (Verdict.INCONCLUSIVE, {"BASELINE_NOISE"})


def test_an_fp32_router_at_r_0_is_right() -> None:
    weight, hidden = normal(8, 64), normal(32, 64, seed=1).bfloat16()
    ref = hidden.float() @ weight.T
    base = (hidden @ weight.bfloat16().T).float()
    target = hidden.float() @ weight.T
    found = compare_3tensors(ref, base, target, target_fp32=hidden.float() @ weight.T)
    result = judge(found, Thresholds())
    assert found.r_ratio == 0.0 and result.verdict is Verdict.PASS
    assert [note.code for note in result.notes] == ["R_ZERO"] and "kept in fp32" in result.notes[0].message
    exact_weight = weight.bfloat16().float()  # bf16-representable data: the baseline is exact as well
    ref = hidden.float() @ exact_weight.T
    found = compare_3tensors(ref, hidden.float() @ exact_weight.T, hidden.float() @ exact_weight.T)
    assert found.mode == "exact" and verdict(found)[0] is Verdict.PASS
    split = hidden.float()[:, :32] @ exact_weight.T[:32] + hidden.float()[:, 32:] @ exact_weight.T[32:]
    assert verdict(compare_3tensors(ref, ref.clone(), split))[0] is Verdict.PASS
    in_bf16 = hidden @ exact_weight.bfloat16().T  # a router that must be fp32 and is not
    assert verdict(compare_3tensors(ref, ref.clone(), in_bf16))[0] is Verdict.FAIL


def test_over_precision_is_a_note_that_says_where() -> None:
    ref = normal(64, 64)
    base = (ref * (1 + 0.01 * normal(64, 64, seed=1))).bfloat16()
    result = judge(compare_3tensors(ref, base, ref.bfloat16(), name="norm"), Thresholds())
    assert result.verdict is Verdict.PASS and result.notes[0].code == "OVER_PRECISION"
    assert "norm computes in more than bf16 inside" in result.notes[0].message


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 2) * 1j,
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2, device="meta"),
        "text",
        None,
        (torch.ones(2),),
    ],
    ids=["complex", "sparse", "meta", "text", "none", "tuple"],
)
def test_what_is_no_real_tensor_is_refused(value: object) -> None:
    good = torch.ones(2, 2)
    with pytest.raises(ComparisonError) as caught:
        compare_3tensors(good, good.bfloat16(), value, name="mlp")  # type: ignore[arg-type]
    assert caught.value.code is ReasonCode.UNSUPPORTED_TENSOR and "target" in caught.value.line()


def test_gradients_strides_and_negative_zero() -> None:
    ref = normal(12, 10)
    found = compare_3tensors(ref.T.contiguous().T.requires_grad_(), ref.bfloat16(), ref.bfloat16()[:, :])
    assert verdict(found)[0] is Verdict.PASS
    strided = torch.empty(12, 20)[:, ::2].copy_(ref)
    assert compare_3tensors(strided, ref.bfloat16(), ref.bfloat16()).r_ratio == found.r_ratio
    zeros = torch.tensor([0.0, 1.0, 2.0])
    assert verdict(compare_3tensors(zeros, zeros.clone(), torch.tensor([-0.0, 1.0, 2.0])))[0] is Verdict.PASS


def test_inputs_are_not_modified() -> None:
    ref = normal(8, 8).double()
    ref[0, 0] = float("nan")
    kept = [ref.clone(), ref.bfloat16(), ref.clone()]
    given = [item.clone() for item in kept]
    compare_3tensors(*given)
    for before, after in zip(kept, given, strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("label", ["", "split", "split:0", "split:1", "split:x", "half"])
def test_unknown_baseline_labels_are_refused(label: str) -> None:
    ref = normal(4, 4)
    with pytest.raises(EquiportError, match="baseline"):
        compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), baseline=label)


def test_the_check_refuses_nonsense() -> None:
    ref = normal(4, 4)
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16())
    for tolerance in (float("nan"), float("inf"), 0.0, -1.0, True):
        with pytest.raises(EquiportError, match="tolerance_ratio"):
            check_3tensor_result(found, "x", tolerance)
    with pytest.raises(EquiportError, match="Comparison"):
        check_3tensor_result(True, "x")  # type: ignore[arg-type]


def test_the_check_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ref = normal(64, 64)
    assert check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), ref.bfloat16()), "mlp") is True
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and line.startswith("PASS mlp: R=1") and "blind spot: no fp32 evidence" in line
    assert check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), 2 * ref.bfloat16()), "mlp") is False
    assert "R_SINGLE" in capsys.readouterr().out
