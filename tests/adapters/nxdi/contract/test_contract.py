"""The stand-in against the real stack, case by case. Without the real stack the cases still run on the stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from registry import cases, load_cases
from tiers import answers, figures, why_no_real_tier

load_cases()
NAMES = [item.name for item in cases()]
TOLERANCE = 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_case_runs_on_the_standin(name: str) -> None:
    answer = answers("standin")[name]
    assert not answer.failure
    assert answer.values


@pytest.mark.skipif(bool(why_no_real_tier()), reason=why_no_real_tier())
@pytest.mark.parametrize("name", NAMES)
def test_the_standin_answers_as_the_real_stack(name: str) -> None:
    off = [figure for figure in figures(name) if not figure.difference <= TOLERANCE]
    assert not off, "\n".join(f"{figure.value}: {figure.difference:.1e} {figure.note}" for figure in off[:10])
