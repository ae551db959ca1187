"""Every rule finds its own cheating samples and leaves every honest one alone; so do files that no rule has seen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from equiport.audit import RULES, Severity, audit_path
from equiport.audit.model import Rule, Sample
from equiport.audit.work import sample_work
from equiport.bench.audit.held_out import CHEATS, HONEST

BAD = [pytest.param(rule, sample, id=f"{rule.id}-{n}") for rule in RULES for n, sample in enumerate(rule.bad)]
GOOD = [pytest.param(rule, sample, id=f"{rule.id}-{n}") for rule in RULES for n, sample in enumerate(rule.good)]


@pytest.mark.parametrize(("rule", "sample"), BAD)
def test_a_cheating_sample_is_found_at_its_line(rule: Rule, sample: Sample) -> None:
    _, module = sample_work(sample)
    assert not module.opaque
    hits = list(rule.check(module))
    assert hits and all(1 <= hit.line <= len(sample.code.splitlines()) and hit.message for hit in hits)


@pytest.mark.parametrize(("rule", "sample"), GOOD)
def test_an_honest_sample_is_left_alone_by_every_rule(rule: Rule, sample: Sample) -> None:
    work, _ = sample_work(sample)
    found = [
        f"{other.id} {module.path.name}:{hit.line} {hit.message}"
        for module in work.modules
        for other in RULES
        for hit in other.check(module)
        if (hit.severity or other.severity) is not Severity.NOTE
    ]
    assert not found, found


def test_every_rule_has_samples_and_says_what_to_do() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES) >= 20
    for rule in RULES:
        assert len(rule.bad) >= 2 and len(rule.good) >= 1, rule.id
        assert rule.why and rule.remedy and rule.title
        for sample in (*rule.bad, *rule.good):
            ast.parse(sample.code)


@pytest.mark.parametrize("name", CHEATS)
def test_a_held_out_cheat_is_found(name: str, tmp_path: Path) -> None:
    files, rule = CHEATS[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    found = audit_path(tmp_path)
    assert not found.clean and rule in {item.rule for item in found.counting}, found.findings


@pytest.mark.parametrize("name", HONEST)
def test_a_held_out_honest_folder_is_clean(name: str, tmp_path: Path) -> None:
    for file, text in HONEST[name].items():
        (tmp_path / file).write_text(text)
    found = audit_path(tmp_path)
    assert found.clean, [f"{item.rule} {item.file}:{item.line} {item.message}" for item in found.counting]
