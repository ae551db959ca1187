"""The 2-tensor method: a baseline of machine-epsilon perturbations."""

from __future__ import annotations

import pytest
import torch

from equiport.compare import ComparisonError, Thresholds, Verdict, compare_2tensors, epsilon_draws, judge
from equiport.compare.comparison import Comparison
from equiport.errors import EquiportError


def block(inputs: torch.Tensor) -> torch.Tensor:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16() / 8
    return torch.nn.functional.silu(inputs @ weight.T)


def inputs() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def verdict(found: Comparison) -> Verdict:
    return judge(found, Thresholds()).verdict


def test_a_right_and_a_wrong_port_against_drawn_baselines() -> None:
    draws = epsilon_draws(block, [inputs()], draws=5)
    assert len(draws) == 5 and not torch.equal(draws[0], draws[1])
    reference = block(inputs())
    reordered = torch.nn.functional.silu(sum(inputs()[:, i::2] @ _weight()[:, i::2].T for i in (0, 1)))
    good = compare_2tensors(reference, reordered, name="block", draws=draws)
    assert good.method == "2-tensor" and good.baseline == "epsilon-input:5" and good.draws == 5
    assert verdict(good) is Verdict.PASS
    bad = compare_2tensors(reference, torch.nn.functional.gelu(inputs() @ _weight().T), draws=draws)
    assert verdict(bad) is Verdict.FAIL


def _weight() -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16() / 8


def test_tensors_alone_are_perturbed_by_the_dtypes_epsilon() -> None:
    reference = block(inputs())
    found = compare_2tensors(reference, reference.clone())
    cast = compare_2tensors(reference.float(), reference.float())
    assert found.baseline == "epsilon-output:5" and found.r_ratio == 0 and verdict(found) is Verdict.PASS
    expected = 2**-8 / 3**0.5  # uniform within half an epsilon, relative
    assert found.noise == pytest.approx(expected, rel=0.05) and cast.noise == pytest.approx(expected, rel=0.05)
    assert verdict(compare_2tensors(reference, reference * 1.02)) is Verdict.FAIL
    fp32 = compare_2tensors(reference.float() / 3, reference.float() / 3)
    assert fp32.mode == "exact"  # fp32's epsilon is below what counts as a baseline: the target has to be equal


def test_pooled_draws_are_a_mean_square() -> None:
    reference = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    draws = [reference + 0.01, reference - 0.03]
    found = compare_2tensors(reference, reference + 0.02, draws=draws)
    assert found.r_ratio == pytest.approx(0.02 / ((0.01**2 + 0.03**2) / 2) ** 0.5, rel=1e-4)


def test_integer_inputs_stay_and_lookups_are_exact() -> None:
    table = torch.randn(10, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.tensor([3, 1, 4])
    draws = epsilon_draws(lambda index: table[index], [ids], draws=3)
    assert compare_2tensors(table[ids], table[ids], draws=draws).mode == "exact"
    assert verdict(compare_2tensors(table[ids], table[ids], draws=draws)) is Verdict.PASS
    assert verdict(compare_2tensors(table[ids], table[ids + 1], draws=draws)) is Verdict.FAIL


def test_no_draws_and_other_shapes_are_refused() -> None:
    reference = torch.ones(2, 2)
    for draws in (0, -1, []):
        with pytest.raises(EquiportError, match="draw"):
            compare_2tensors(reference, reference.clone(), draws=draws)
    with pytest.raises(ComparisonError, match="draw_0"):
        compare_2tensors(reference, reference.clone(), draws=[torch.ones(4)])
    with pytest.raises(EquiportError, match="at least one"):
        epsilon_draws(block, [inputs()], draws=0)
