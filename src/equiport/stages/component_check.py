"""What a generated component test calls: compare, record, judge all draws of a component together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from equiport.compare.comparison import Comparison, Labels
from equiport.compare.gates import GateResult, judge
from equiport.compare.gates_components import component_gate
from equiport.compare.records import append_record, make_record
from equiport.compare.threeway import compare_3tensors
from equiport.compare.thresholds import SHIPPED_THRESHOLDS, Thresholds, load_thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.trace.sample import ComponentSample

THRESHOLDS_ENV = "EQUIPORT_THRESHOLDS"
"""Names the thresholds file of the stage that runs the tests."""


def compare_sample(sample: ComponentSample, plots_dir: Path | None = None) -> Comparison:
    """The three-tensor comparison (with target_fp32) of one traced sample, labelled for its records.

    Raises:
        EquiportError: the sample holds no tensors.
    """
    if sample.ref_fp32 is None or sample.ref_bf16 is None or sample.target is None:
        raise EquiportError(sample.problem or "holds no tensors", where=sample.name)
    found = compare_3tensors(
        sample.ref_fp32,
        sample.ref_bf16,
        sample.target,
        target_fp32=sample.target_fp32,
        name=sample.name,
        baseline="plain" if sample.reduction_split == 1 else f"split:{sample.reduction_split}",
        plots_dir=plots_dir,
        labels=labels_of(sample),
    )
    return found.model_copy(update={"tokens": sample.tokens, "tokens_unsure": sample.unsure})


def labels_of(sample: ComponentSample) -> Labels:
    """What the records of a sample say of it."""
    return Labels(
        component=sample.component,
        component_type=sample.component_type,
        layer=sample.layer,
        seed=sample.seed,
        fixture=sample.fixture_kind,
        phase="prefill" if sample.phase == "prefill" else "decode" if sample.phase == "decode" else "",
    )


def check_components(comparisons: Sequence[Comparison], name: str) -> bool:
    """Record every comparison, judge them together by the component gate, print one line. True only on PASS.

    A single draw of a correct component may exceed 1.2 (facts: up to 1.33); over layers and seeds it may not.
    """
    for comparison in comparisons:
        limit = SHIPPED_THRESHOLDS.r_slice
        result = judge(comparison, SHIPPED_THRESHOLDS, limit)
        append_record(make_record(comparison.name, comparison=comparison, result=result, tolerance_ratio=limit))
    result = judge_by_fixture(comparisons)
    worst = max((item.r_ratio for item in comparisons), default=float("nan"))
    worst_fp32 = max((item.r32 for item in comparisons if item.r32 is not None), default=float("nan"))
    said = "; ".join(f"{reason.code} {reason.subject}: {reason.message}" for reason in result.reasons[:3])
    print(
        f"{result.verdict.value} {name}: {len(comparisons)} comparisons, R <= {worst:.4g}, R32 <= {worst_fp32:.3g}"
        + (f" | {said}" if said else "")
    )
    return result.verdict is Verdict.PASS


def judge_by_fixture(comparisons: Sequence[Comparison]) -> GateResult:
    """The component gate, applied to each fixture apart: a loud fixture must not hide behind a quiet one."""
    from equiport.compare.gates import join

    file = os.environ.get(THRESHOLDS_ENV)
    limits: Thresholds = load_thresholds(file) if file else SHIPPED_THRESHOLDS
    fixtures = dict.fromkeys(item.labels.fixture for item in comparisons)
    return join(
        "components",
        [
            component_gate([item for item in comparisons if item.labels.fixture == fixture], limits)
            for fixture in fixtures
        ],
    )
