"""Would the component tests notice a wrong port? Part of stage 2, before its traces are dropped.

Generated tests that nobody edited are the toolkit's own: the functions they call are called here on spoilt samples.
Files that somebody wrote or edited run in limited processes, with the same samples or ports spoilt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from equiport.audit.dynamic import rules
from equiport.audit.dynamic.contract import BASIC
from equiport.audit.dynamic.findings import Places, dynamic_report
from equiport.audit.dynamic.launch import DynamicOptions
from equiport.audit.dynamic.mutants import spoil
from equiport.audit.dynamic.port_launch import Part, check_tests, keep, key_of
from equiport.audit.engine import let_stand
from equiport.audit.experiment import suppressions_of
from equiport.audit.report import DynamicReport, Finding, MutantRow
from equiport.compare.verdict import Verdict
from equiport.experiment import Experiment
from equiport.stages.component_check import compare_sample, judge_by_fixture
from equiport.stages.component_fixtures import component_samples, trace_folder
from equiport.stages.generate_tests import is_generated
from equiport.trace.sample import ComponentSample

_TRIES = 6
_OPTIONS = DynamicOptions(seconds=180.0, job_seconds=90.0)


def notice_wrong_ports(
    experiment: Experiment, tests: Path, components: Sequence[str], *, patched: bool
) -> list[Finding]:
    """Try wrong ports on every test of an experiment, and keep what was found for the report.

    Returns the findings that no suppression lets stand.
    """
    files = sorted(tests.glob("test_*.py"))
    own = [file for file in files if not is_generated(file.read_text(encoding="utf-8", errors="replace"))]
    found: list[Finding] = []
    total = DynamicReport(key=key_of(experiment, "tests", patched))
    if len(own) < len(files):
        rows, lived = _spoilt_samples(experiment, components)
        places = Places(tests.absolute(), experiment.root)
        found += [places.finding(rules.MUTANT_LIVES, files[0].name, text) for text in lived]
        total = total.model_copy(update={"checks": ["samples"], "tests": len(files) - len(own), "mutants": rows,
                                         "subjects": rows[0].total if rows else 0})  # fmt: skip
    if own:
        run, said = check_tests(experiment, own, _OPTIONS)
        found += said
        total = _joined(total, dynamic_report(run, total.key))
    keep(experiment, tests=Part(report=total, findings=found))
    judged, _ = let_stand(found, suppressions_of(experiment))
    return [item for item in judged if item.counts]


def _spoilt_samples(experiment: Experiment, components: Sequence[str]) -> tuple[list[MutantRow], list[str]]:
    """A sample of each component that passes, and the same spoilt: it must pass no more."""
    killed = {name: 0 for name in (*BASIC, "row")}
    tried, lived = 0, []
    for component in components:
        sample = _passing(component_samples(trace_folder(experiment), component))
        if sample is None:
            continue
        tried += 1
        for name in killed:
            if judge_by_fixture([compare_sample(_spoilt(sample, name))]).verdict is Verdict.PASS:
                lived.append(f"{component}: its test passes with {name} in place of the port's output")
            else:
                killed[name] += 1
    rows = [MutantRow(mutant=name, killed=count, total=tried) for name, count in killed.items()] if tried else []
    return rows, lived


def _passing(samples: Sequence[ComponentSample]) -> ComponentSample | None:
    """The first of some samples that passes by itself: one draw may be undecided."""
    for sample in [item for item in samples if item.target is not None][:_TRIES]:
        if judge_by_fixture([compare_sample(sample)]).verdict is Verdict.PASS:
            return sample
    return None


def _spoilt(sample: ComponentSample, name: str) -> ComponentSample:
    def changed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else spoil(name, tensor)

    return dataclasses.replace(sample, target=changed(sample.target), target_fp32=changed(sample.target_fp32))


def _joined(one: DynamicReport, other: DynamicReport) -> DynamicReport:
    """Both reports as one."""
    names = list(dict.fromkeys(row.mutant for row in (*one.mutants, *other.mutants)))
    rows = []
    for name in names:
        same = [row for row in (*one.mutants, *other.mutants) if row.mutant == name]
        rows.append(MutantRow(mutant=name, killed=sum(r.killed for r in same), total=sum(r.total for r in same)))
    return other.model_copy(
        update={
            "checks": [*one.checks, *other.checks],
            "tests": one.tests + other.tests,
            "subjects": one.subjects + other.subjects,
            "mutants": rows,
        }
    )
