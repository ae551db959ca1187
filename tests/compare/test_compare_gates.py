"""Gates on lists of comparisons, thresholds and their file, the smoke gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equiport.compare import (
    SEED_THRESHOLDS,
    Comparison,
    GateResult,
    Labels,
    PromptTokens,
    ReasonCode,
    Thresholds,
    Verdict,
    compare_3tensors,
    component_gate,
    fp32_gate,
    load_thresholds,
    smoke_gate,
    three_way_gate,
)
from equiport.errors import EquiportError

SHIPPED = Thresholds()


def measured(ratio: float, *, seed: int | None = 0, layer: int = 0, component: str = "mlp") -> Comparison:
    """A real comparison, relabelled and with R set: gates see numbers, not tensors."""
    ref = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    found = compare_3tensors(
        ref,
        ref.bfloat16(),
        ref.bfloat16(),
        target_fp32=ref.clone(),
        labels=Labels(component=component, layer=layer, seed=seed),
    )
    return found.model_copy(update={"r_ratio": ratio})


def grid(*ratios_by_seed: list[float]) -> list[Comparison]:
    """One component type: a list of R over layers for each seed."""
    return [
        measured(ratio, seed=seed, layer=layer)
        for seed, ratios in enumerate(ratios_by_seed)
        for layer, ratio in enumerate(ratios)
    ]


def codes(result: GateResult) -> set[str]:
    return {item.code for item in result.reasons}


def test_an_empty_list_is_never_a_pass() -> None:
    result = component_gate([], SHIPPED)
    assert result.verdict is Verdict.NOT_RUN and codes(result) == {"NO_COMPARISON"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_broken_ratio_fails_whatever_the_rest(value: float) -> None:
    result = component_gate(grid([0.9, 1.0], [1.0, value], [0.9, 1.0]), SHIPPED)
    assert result.verdict is Verdict.FAIL and "NON_FINITE_METRIC" in codes(result)
    single = component_gate([measured(value)], SHIPPED)
    assert single.verdict is Verdict.FAIL


def test_correct_components_pass_though_single_draws_exceed_the_documented_limit() -> None:
    result = component_gate(grid([1.0, 1.33, 0.8], [0.95, 1.0, 1.0], [1.0, 0.9, 1.1]), SHIPPED)
    assert result.verdict is Verdict.PASS
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["singles_at_or_above_documented"] == 1 and figures["r_worst"] == 1.33


def test_a_small_shift_of_all_layers_fails() -> None:
    result = component_gate(grid([1.22, 1.3, 1.15], [1.2, 1.25, 1.2], [1.21, 1.1, 1.3]), SHIPPED)
    assert result.verdict is Verdict.FAIL and codes(result) == {"R_GEOMEAN"}


def test_one_bad_component_is_not_drowned_by_its_type() -> None:
    result = component_gate(grid([0.9, 1.6, 0.9, 0.9], [0.9, 1.7, 0.9, 0.9], [0.9, 1.5, 0.9, 0.9]), SHIPPED)
    assert result.verdict is Verdict.FAIL and codes(result) == {"R_COMPONENT"}
    assert "layer 1" in result.reasons[0].subject


def test_over_precision_buys_no_credit() -> None:
    result = component_gate(grid([0.0, 2.4], [0.0, 2.3], [0.0, 2.2]), SHIPPED)
    assert result.verdict is Verdict.FAIL
    assert {"R_ZERO"} <= {note.code for note in result.notes}
    hidden = component_gate(grid(*[[0.0, 1.45, 1.45, 1.45, 1.45]] * 3), SHIPPED)
    assert hidden.verdict is Verdict.FAIL and codes(hidden) == {"R_GEOMEAN"}


def test_straddling_seeds_are_inconclusive_until_enough_are_drawn() -> None:
    result = component_gate(grid([1.05, 1.05], [1.14, 1.14], [1.02, 1.02]), SHIPPED)
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"SEEDS_STRADDLE"}
    more = [[1.0, 1.0]] * 7 + [[1.12, 1.12]]
    assert component_gate(grid(*more), SHIPPED).verdict is Verdict.PASS
    worse = [[1.2, 1.2]] * 7 + [[1.09, 1.09]]
    assert component_gate(grid(*worse), SHIPPED).verdict is Verdict.FAIL
    near = [[1.08, 1.08], [1.12, 1.12]] * 4
    assert component_gate(grid(*near), SHIPPED).verdict is Verdict.INCONCLUSIVE


def test_one_seed_uses_the_documented_limit() -> None:
    assert component_gate([measured(1.19)], SHIPPED).verdict is Verdict.PASS
    assert component_gate([measured(1.9)], SHIPPED).verdict is Verdict.FAIL
    layers = component_gate(grid([0.9, 1.3, 0.9]), SHIPPED)
    assert layers.verdict is Verdict.INCONCLUSIVE and codes(layers) == {"TOO_FEW_SEEDS"}


def test_missing_fp32_evidence_is_a_blind_spot_and_not_a_pass_of_the_fp32_gate() -> None:
    bare = measured(1.0).model_copy(update={"r32": None, "r32_slices": ()})
    assert fp32_gate(bare, SHIPPED).verdict is Verdict.NOT_RUN
    result = component_gate([bare], SHIPPED)
    assert result.verdict is Verdict.PASS and [item.code for item in result.blind_spots] == ["NO_FP32_EVIDENCE"]
    wrong = measured(1.0).model_copy(update={"r32": 0.01})
    assert codes(component_gate([measured(1.0, seed=1), wrong], SHIPPED)) == {"R32_POOLED"}
    nan = measured(1.0).model_copy(update={"r32": float("nan")})
    assert fp32_gate(nan, SHIPPED).verdict is Verdict.FAIL


def test_exact_comparisons_do_not_enter_the_means() -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = compare_3tensors(table.float(), table, table.clone())
    wrong = compare_3tensors(table.float(), table, table.roll(1, 0))
    assert component_gate([exact], SHIPPED).verdict is Verdict.PASS
    assert component_gate([exact, *grid([1.0], [1.0], [1.0])], SHIPPED).verdict is Verdict.PASS
    assert component_gate([wrong, *grid([1.0], [1.0], [1.0])], SHIPPED).verdict is Verdict.FAIL


def test_the_three_way_gate() -> None:
    assert three_way_gate(measured(1.0), SHIPPED).verdict is Verdict.PASS
    found = measured(1.0).model_copy(
        update={"bc": 0.5, "sigma_ratio": 1.5, "linf_ratio": 6.0, "l2_ratio": float("nan")}
    )
    assert codes(three_way_gate(found, SHIPPED)) == {"BC_SIGMA", "LINF_RATIO", "L2_RATIO"}
    broken = measured(1.0).model_copy(update={"bc": float("nan"), "sigma_ratio": float("nan")})
    assert three_way_gate(broken, SHIPPED).verdict is Verdict.FAIL


def test_smoke_counts_nothing_after_a_divergence_and_nothing_missing() -> None:
    expected = tuple(range(32))
    after = (0, 1, *range(50, 51), *range(3, 32))  # equal again after the divergence
    assert smoke_gate([PromptTokens(expected, expected)], SHIPPED).verdict is Verdict.PASS
    result = smoke_gate([PromptTokens(expected, after)], SHIPPED)
    assert result.verdict is Verdict.FAIL and result.figures[0].value == pytest.approx(2 / 32)
    assert smoke_gate([PromptTokens(expected, expected[:9])], SHIPPED).verdict is Verdict.FAIL
    assert smoke_gate([PromptTokens(expected, ())], SHIPPED).verdict is Verdict.FAIL
    assert smoke_gate([], SHIPPED).verdict is Verdict.NOT_RUN
    assert smoke_gate([PromptTokens((), ())], SHIPPED).verdict is Verdict.NOT_RUN
    assert smoke_gate([PromptTokens((1,), (1,))], SHIPPED).verdict is Verdict.INCONCLUSIVE


def test_thresholds_round_trip_and_partial_files(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    chosen = Thresholds(delta=0.003, calibrated=True)
    chosen.save(path)
    assert load_thresholds(path) == chosen
    path.write_text('{"theta": 0.99}')
    assert load_thresholds(path) == Thresholds(theta=0.99)
    assert (SEED_THRESHOLDS.theta, SEED_THRESHOLDS.top1, SEED_THRESHOLDS.r_single) == (0.95, 0.5, 1.2)
    assert (SHIPPED.theta, SHIPPED.delta, SHIPPED.tau_r, SHIPPED.top1) == (0.995, 0.01, 1.2, 0.9)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"r_geomean": "1.1"}', "r_geomean"),
        ('{"r_geomean": NaN}', "r_geomean"),
        ('{"r_geomean": Infinity}', "r_geomean"),
        ('{"r_geomean": -1}', "r_geomean"),
        ('{"theta": 1.5}', "theta"),
        ('{"min_seeds": 0}', "min_seeds"),
        ('{"tau": 1.2}', "tau"),
        ("[]", ""),
        ("{", ""),
    ],
)
def test_bad_threshold_files_name_file_and_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text(text)
    with pytest.raises(EquiportError) as caught:
        load_thresholds(path)
    assert "thresholds.json" in caught.value.line() and caught.value.field == field
    with pytest.raises(EquiportError, match="missing.json"):
        load_thresholds(tmp_path / "missing.json")


def test_every_code_that_gates_give_is_in_the_closed_set() -> None:
    results = [component_gate([], SHIPPED), component_gate(grid([2.0], [2.0]), SHIPPED), smoke_gate([], SHIPPED)]
    known = {code.value for code in ReasonCode}
    assert all(item.code in known for result in results for item in (*result.reasons, *result.notes))
