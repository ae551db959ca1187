"""What pages claim holds: their Python runs, their commands run, their names exist, their mapping is accepted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from worlds import World

from equiport.content import content_dir
from equiport.skills.page import Page, read_page

ROOT = content_dir("skills").parent
PAGES = [
    read_page(path) for folder in ("skills", "agents", "references") for path in sorted((ROOT / folder).rglob("*.md"))
]
WITH_PYTHON = [page for page in PAGES if any(fence.language == "python" for fence in page.fences)]
STAGES = ROOT / "skills" / "validate-equivalence" / "references"


def name(page: Page) -> str:
    return page.path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def surroundings(done_template: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pages speak of: hf_model, port/ and a finished experiment exp."""
    folder = tmp_path_factory.mktemp("pages")
    for link, target in (("hf_model", done_template.model), ("port", done_template.root / "port"),
                         ("exp", done_template.exp)):  # fmt: skip
        (folder / link).symlink_to(target)
    return folder


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_of_a_page_runs(page: Page, surroundings: Path, tmp_path: Path) -> None:
    """All blocks of a page in order, in one process, each at its own line numbers."""
    text = ""
    for fence in page.fences:
        if fence.language == "python":
            assert "no-run" not in fence.words, "Python in pages runs"
            text += "\n" * (fence.line - 1 - text.count("\n")) + fence.text
    script = tmp_path / f"{page.path.stem}.py"
    script.write_text(text)
    for link in surroundings.iterdir():
        (tmp_path / link.name).symlink_to(link)
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, f"{name(page)}:\n{ran.stdout}{ran.stderr}"


WITH_SHELL = [
    page
    for page in PAGES
    if page.path.parent == ROOT / "references" and any(one.language == "bash" and not one.words for one in page.fences)
]


@pytest.mark.parametrize("page", WITH_SHELL, ids=name)
def test_commands_of_a_reference_run(page: Page, done: World, commands: Path) -> None:
    """Where a right port was validated, every command of a reference ends with 0."""
    inputs = {"HF_DIR": done.model, "PORT": done.port, "EXP_DIR": done.exp}
    for fence in page.fences:
        if fence.language == "bash" and not fence.words:
            ran = subprocess.run(
                ["bash", "-euc", fence.text], cwd=ROOT, capture_output=True, text=True, timeout=300,
                env={**os.environ, **{key: str(value) for key, value in inputs.items()},
                     "PATH": f"{commands}:{os.environ['PATH']}"},
            )  # fmt: skip
            assert ran.returncode == 0, f"{fence.text}\n{ran.stdout}{ran.stderr}"


def test_most_blocks_run() -> None:
    """Blocks that are not run are few, and say why."""
    fences = [(name(page), fence) for page in PAGES for fence in page.fences if fence.language in ("python", "bash")]
    left = [(where, " ".join(fence.words)) for where, fence in fences if fence.words]
    assert all(re.match(r"no-run: \w+", said) for _, said in left), left
    assert len(left) <= 8 < 30 < len(fences)


def test_bugs_that_pages_name_are_in_the_corpus() -> None:
    from equiport.bench.portbugs.run import PortBugsBench, chosen

    text = "\n".join(page.path.read_text() for page in PAGES)
    named = re.findall(r"bench portbugs --only (\S+)", text)
    assert named and all(chosen(PortBugsBench(only=name)) for name in named)


def test_names_in_capitals_exist() -> None:
    """Reason codes, settings and environment variables that pages name stand somewhere in the code."""
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("src", "adapters", "templates", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".j2")
    )
    placeholders = {"HF_DIR", "PORT_DIR", "EXP_DIR", "INNER_CLASS", "CAUSAL_CLASS", "CONFIG_CLASS"}
    unknown = {
        (name(page), word)
        for page in PAGES
        for span in page.spans
        for word in re.findall(r"(?<![\w$])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?!\w)", span.text)
        if word not in placeholders and word not in code
    }
    assert unknown == set()


def test_files_that_pages_show_are_accepted(tmp_path: Path) -> None:
    """The suppressions file of the audit's page, and the bench config of stage 7's."""
    from equiport.audit.registry import RULES
    from equiport.audit.report import load_suppressions
    from equiport.stages.bench_config import BenchConfig

    shown = next(fence for fence in read_page(ROOT / "skills/audit-port/SKILL.md").fences if fence.language == "json")
    (tmp_path / "shown.json").write_text(shown.text)
    (one,) = load_suppressions(tmp_path / "shown.json")
    assert one.rule in {rule.id for rule in RULES}
    config = next(fence for fence in read_page(STAGES / "stage-7.md").fences if fence.language == "yaml")
    assert BenchConfig.model_validate(yaml.safe_load(config.text)).benchmarks.lm_eval["accuracy"].limit == 200


def test_the_mapping_example_is_accepted(fresh: World) -> None:
    """Stage 0 validates it against the trees of the example port, and finds nothing unmapped."""
    fresh.exp.mkdir()
    mapping = json.loads((ROOT / "references" / "mapping_example.json").read_text())
    (fresh.exp / "component_mapping.json").write_text(json.dumps(mapping))
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "run_stage0.py"), *fresh.stage0_flags], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = fresh.result(0)
    assert result["verdict"] == "PASS" and result["metrics"]["mapping"] == "validated as found"
    assert json.loads((fresh.exp / "component_mapping.json").read_text()) == mapping
    assert all(len(entry[2]["reasoning"]) > 20 for entry in mapping)
