"""Shapes that differ: settled only inside a component that passes everywhere, and when nothing else was refused."""

from __future__ import annotations

import pytest
import torch

from equiport.compare.comparison import Labels
from equiport.compare.gates import judge
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.records import Record, make_record
from equiport.compare.streams import ComparisonError
from equiport.compare.threeway import compare_3tensors
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason
from equiport.stages.boundaries import settle_boundaries
from equiport.stages.component_evidence import FileEvidence
from equiport.stages.component_rows import ComponentRow, component_rows, evidence_reasons, row_reasons
from equiport.stages.instances import instance_rows
from equiport.structure.mapping import ComponentMapping, MappingEntry

INNER, AROUND = "layers.{i}.mlp.gate_proj", "layers.{i}.mlp"
FIXTURES = ("real", "perturbed")


def traced(component: str, fixture: str, phase: str, fault: float = 0.0, in_bf16: bool = False) -> Record:
    """A record of a component whose target is the source's but for `fault`, relative."""
    generator = torch.Generator().manual_seed(len(component) + len(fixture) + len(phase))
    exact = torch.randn(20, 32, generator=generator)
    low, wrong = exact.bfloat16(), exact * (1 + fault * torch.randn(20, 32, generator=generator))
    name, labels = _name(component, fixture, phase), _labels(component, fixture, phase)
    target = wrong.bfloat16() if in_bf16 else low + (wrong - exact).bfloat16()
    found = compare_3tensors(exact, low, target, target_fp32=exact if in_bf16 else wrong, name=name, labels=labels)
    return make_record(found.name, comparison=found, result=judge(found, Thresholds(), 100.0))


def refused(component: str, fixture: str, phase: str, code: ReasonCode | None = None) -> Record:
    """A record of tensors that do not fit."""
    name, labels = _name(component, fixture, phase), _labels(component, fixture, phase)
    with pytest.raises(ComparisonError) as caught:
        compare_3tensors(torch.ones(2, 160), torch.ones(2, 160), torch.ones(2, 192), name=name)
    said = reason(code or caught.value.code, caught.value.what, name)
    return make_record(name, reasons=(said,), labels=labels)


def _name(component: str, fixture: str, phase: str) -> str:
    return f"{component.replace('{i}', '0')} [{phase}, {fixture}]"


def _labels(component: str, fixture: str, phase: str) -> Labels:
    kind = component.rsplit(".", 1)[-1]
    return Labels(component=component, component_type=kind, layer=0, seed=1, fixture=fixture, phase=phase)


def judged(records: list[Record], around: str = AROUND) -> tuple[list[ComponentRow], list[Reason]]:
    """Rows after settling, and all that speaks against them."""
    names = (INNER, around)
    mapping = ComponentMapping(tuple(MappingEntry((f"model.{name}",), (name,), indices=((0,),)) for name in names))
    said = [Reason("COMPARISON_REFUSED", "", record.name) for record in records if record.comparison is None]
    evidence = [FileEvidence("test.py", tuple(records), 1, tuple(said), "")]
    rows = component_rows(evidence, Thresholds())
    rows = settle_boundaries(rows, instance_rows(records, Thresholds()), mapping)
    return rows, [*row_reasons(rows), *evidence_reasons(evidence, rows)]


def around(name: str = AROUND, **last: object) -> list[Record]:
    places = [(fixture, phase) for fixture in FIXTURES for phase in ("prefill", "decode")]
    return [traced(name, *place, **(last if place == places[-1] else {})) for place in places]  # type: ignore[arg-type]


def test_another_shape_inside_what_passes_is_settled() -> None:
    rows, reasons = judged([refused(INNER, "perturbed", "prefill"), *around()])
    assert reasons == []
    assert {row.boundary for row in rows if row.component == INNER} == {AROUND}


@pytest.mark.parametrize(
    "records,outer",
    [
        ([refused(INNER, "perturbed", "prefill"), *around(fault=0.1)], AROUND),
        ([refused(INNER, "perturbed", "prefill"), *around(fault=0.1, in_bf16=True)], AROUND),
        ([refused(INNER, "perturbed", "prefill"), *around("layers.{i}.self_attn")], "layers.{i}.self_attn"),
        ([refused(INNER, "perturbed", "prefill")], AROUND),
        ([refused(INNER, "stress", "prefill"), *around()], AROUND),
        ([refused(INNER, "perturbed", "prefill"), refused(AROUND, "perturbed", "prefill"), *around()], AROUND),
        ([refused(INNER, "perturbed", "prefill", ReasonCode.UNSUPPORTED_TENSOR), *around()], AROUND),
        ([traced(INNER, "real", "prefill", 0.1), refused(INNER, "perturbed", "prefill"), *around(fault=0.1)], AROUND),
    ],
    ids=[
        "around fails in fp32", "around fails in bf16", "nothing around", "around is not compared",
        "around is not run there", "around is refused too", "no shape", "wrong as well",
    ],
)  # fmt: skip
def test_another_shape_is_a_failure_elsewhere(records: list[Record], outer: str) -> None:
    _, reasons = judged(records, outer)
    subjects = {item.subject for item in reasons}
    assert any(item.code == "COMPARISON_REFUSED" and item.subject.startswith("layers.0.mlp.gate") for item in reasons)
    assert INNER in subjects or "UNSUPPORTED" in str(records[0].reasons), reasons
