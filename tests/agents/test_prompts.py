"""The agents' pages: complete, with few tools, and the only prompts there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiport.agents import prompts
from equiport.agents.prompts import load_prompt
from equiport.content import content_dir
from equiport.errors import EquiportError

NAMES = ("orchestrator", "planner", "nxdi-block-translator", "scaffolder", "weight-mapper", "equivalence-debugger",
         "port-auditor")  # fmt: skip


def test_the_pages_are_these() -> None:
    assert sorted(path.stem for path in content_dir("agents").glob("*.md")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_whole(name: str) -> None:
    prompt = load_prompt(name)
    assert 40 < len(prompt.description) < 250 and len(prompt.text) > 300
    if name != "orchestrator":
        assert set(prompt.tools) <= {"Read", "Write", "Edit", "Glob", "Grep"}
    if name in ("planner", "scaffolder", "weight-mapper", "port-auditor"):
        assert not {"Write", "Edit"} & set(prompt.tools)


def test_what_the_engine_asks_for_is_there() -> None:
    """Every page that the engine names exists, and no prompt stands in the engine."""
    source = Path(prompts.__file__).parents[1]
    named = set()
    for file in sorted([*(source / "port").glob("*agent*.py"), *(source / "port").glob("unit_*.py")]):
        text = file.read_text()
        named |= {name for name in NAMES if f'"{name}"' in text}
        assert "You are" not in text
    assert named == set(NAMES) - {"orchestrator"}


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("no head", "has no head"),
        ("---\nname: x\ntools: Read\n---\ntext\n", "description: is missing"),
        ("---\nname: y\ndescription: d\ntools: Read\n---\ntext\n", "name: is 'y'"),
        ("---\nname: x\ndescription: d\n---\ntext\n", "tools: is missing"),
        ("---\nname: [\n---\ntext\n", "no YAML"),
    ],
)
def test_a_page_that_would_be_dropped_is_refused(
    page: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.md").write_text(page)
    monkeypatch.setattr(prompts, "content_dir", lambda name: tmp_path)
    with pytest.raises(EquiportError, match=said):
        load_prompt("x")
    with pytest.raises(EquiportError, match="no such agent"):
        load_prompt("z")
