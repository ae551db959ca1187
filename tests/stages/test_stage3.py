"""Localisation: change points, suspects, causes by magnitude."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.stages.change_points import Pattern, change_points
from equiport.stages.component_rows import ComponentRow
from equiport.stages.frame import StageOptions
from equiport.stages.instances import InstanceRow
from equiport.stages.stage2 import ComponentMetrics
from equiport.stages.stage3 import LocalisationMetrics, root_cause, run


def test_a_spike_returns_and_a_step_persists() -> None:
    points = change_points([0.5, 9.0, 0.5, 0.5, 3.0, 4.0, 2.0])
    assert [(point.start, point.end, point.pattern) for point in points] == [
        (4, 6, Pattern.STEP),
        (1, 1, Pattern.SPIKE),
    ]
    assert points[0].peak == 4.0


def test_one_bad_value_alone_is_a_step_and_nan_is_bad() -> None:
    assert change_points([7.0])[0].pattern is Pattern.STEP
    assert [point.start for point in change_points([0.1, float("nan"), 0.1])] == [1]
    assert change_points([0.1, 1.0, 0.9]) == []


@given(st.lists(st.floats(0, 10), max_size=30))
def test_change_points_cover_the_bad_values_and_nothing_else(values: list[float]) -> None:
    covered = {index for point in change_points(values) for index in range(point.start, point.end + 1)}
    assert covered == {index for index, value in enumerate(values) if value > 1.0}


def instance(component: str, kind: str, layer: int | None, r_ratio: float, r32: float) -> InstanceRow:
    excess = max(r_ratio / 1.2, r32 / 1e-3)
    return InstanceRow(
        component=component, component_type=kind, layer=layer, fixture="real", phase="prefill", r_ratio=r_ratio,
        r32=r32, r32_slice=r32, excess=excess,
    )  # fmt: skip


def stage2_file(folder: Path, instances: list[InstanceRow], failing: list[str], verdict: str = "FAIL") -> Path:
    rows = [
        ComponentRow(
            component=name, component_type="x", fixture="real", comparisons=1, verdict=Verdict.FAIL, r_geomean=2.0,
            r_worst=2.0, r32_worst=1.0, r32_slice_worst=1.0, singles_over_documented=1, exact=0, first_bad="",
        )
        for name in failing
    ]  # fmt: skip
    metrics = ComponentMetrics(
        tests=1, comparisons=1, rows=rows, unlabelled=[], uncovered=[], excitation=[], plots=[], instances=instances
    )
    result = StageResult(stage=2, verdict=Verdict(verdict), metrics=metrics.model_dump(mode="json"))
    return result.save(folder / "stage2.json")


def test_the_innermost_earliest_component_is_the_first_suspect(tmp_path: Path) -> None:
    good, bad = (1.0, 1e-5), (40.0, 40.0)
    instances = [
        instance("layers.{i}.mlp.down_proj", "linear", layer, *(bad if layer >= 2 else good)) for layer in range(5)
    ]
    instances += [instance("layers.{i}.mlp", "mlp", layer, *(bad if layer >= 2 else good)) for layer in range(5)]
    instances += [
        instance("layers.{i}.self_attn", "attention", layer, *(bad if layer == 1 else good)) for layer in range(5)
    ]
    file = stage2_file(tmp_path, instances, ["layers.{i}.mlp.down_proj", "layers.{i}.mlp", "layers.{i}.self_attn"])
    result = run(StageOptions(output=tmp_path / "stage3.json", quiet=True), file, 1.2)
    found = LocalisationMetrics.model_validate(result.metrics)
    assert result.verdict is Verdict.PASS
    assert [(s.component, s.layer, s.pattern) for s in found.suspects] == [
        ("layers.{i}.mlp.down_proj", 2, Pattern.STEP),
        ("layers.{i}.self_attn", 1, Pattern.SPIKE),
    ]
    assert found.suspects[0].consequences == ["layers.{i}.mlp"]
    assert json.loads((tmp_path / "stage3.json").read_text())["stage"] == 3


def test_a_failing_component_without_a_change_point_fails_the_stage(tmp_path: Path) -> None:
    file = stage2_file(tmp_path, [instance("norm", "norm", None, 1.0, 1e-5)], ["norm"])
    result = run(StageOptions(output=tmp_path / "stage3.json", quiet=True), file, 1.2)
    assert result.verdict is Verdict.FAIL and result.reasons[0].subject == "norm"


def test_nothing_to_localise_after_a_pass(tmp_path: Path) -> None:
    file = stage2_file(tmp_path, [], [], "PASS")
    assert run(StageOptions(output=tmp_path / "stage3.json", quiet=True), file, 1.2).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("r_ratio", "r32", "cause"),
    [
        (50.0, 50.0, "missing algorithm or wrong formula"),
        (4.0, 4.0, "missing multiplier or wrong order"),
        (1.25, 0.0, "precision order"),
        (1.5, 0.9, "precision order or missing multiplier"),
        (1.0, 0.02, "small difference of formula or constant"),
        (1.0, 1e-5, "local difference"),
    ],
)
def test_causes_by_magnitude(r_ratio: float, r32: float, cause: str) -> None:
    assert root_cause(instance("norm", "norm", 0, r_ratio, r32), Thresholds())[0] == cause


def test_another_stage_or_no_json_is_refused(tmp_path: Path) -> None:
    other = StageResult(stage=1, verdict=Verdict.PASS).save(tmp_path / "stage1.json")
    with pytest.raises(EquiportError, match="stage 1"):
        run(StageOptions(quiet=True), other, 1.2)
    (tmp_path / "stage2.json").write_text("{")
    with pytest.raises(EquiportError, match="is no JSON"):
        run(StageOptions(quiet=True), tmp_path / "stage2.json", 1.2)


def test_a_tightened_limit_of_a_type_has_its_suspect_too(tmp_path: Path) -> None:
    instances = [instance("norm", "norm", None, 1.08, 1e-5)]
    file = stage2_file(tmp_path, instances, ["norm"])
    limits = tmp_path / "limits.json"
    Thresholds(tau_r_by_type={"norm": 1.06}).save(limits)
    shipped = run(StageOptions(output=tmp_path / "a" / "stage3.json", quiet=True), file, 1.2)
    tightened = run(StageOptions(output=tmp_path / "b" / "stage3.json", thresholds=limits, quiet=True), file, 1.2)
    assert LocalisationMetrics.model_validate(shipped.metrics).without_suspect == ["norm"]
    assert LocalisationMetrics.model_validate(tightened.metrics).without_suspect == []
    assert LocalisationMetrics.model_validate(tightened.metrics).suspects[0].root_cause.startswith("precision order")
