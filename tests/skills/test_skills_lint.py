"""`equiport skills lint`: this repository is clean, and each kind of fault is found where it is."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from worlds import equiport_command

from equiport import __version__
from equiport.cli.command_table import command_table
from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.skills.command_line import CommandTable
from equiport.skills.lint import lint

ROOT = Path(__file__).parents[2]
GOOD_SKILL = """---
name: count-things
description: Counts things, for those who want to know how many there are.
---

# Count

See [the page](../../references/page.md#how-to-count), and dispatch `counter`.

```bash
equiport validate --port $PORT --model $HF_DIR --out $EXP_DIR   # everything
python scripts/run_stage2.py --tests-dir $EXP_DIR/tests --generate \\
  --tau-r 1.2
```
"""
GOOD_AGENT = """---
name: counter
description: Counts what it is shown, and says so.
tools: Read, Grep
---
Count.
"""


@pytest.fixture(scope="module")
def table() -> Iterator[CommandTable]:
    yield command_table(content_dir("scripts"))


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A plugin without a fault."""
    files = {
        ".claude-plugin/plugin.json": json.dumps({"name": "things", "version": __version__}),
        "skills/count-things/SKILL.md": GOOD_SKILL,
        "agents/counter.md": GOOD_AGENT,
        "references/page.md": "# Page\n\n## How to count\n\nBy `equiport report EXP_DIR`.\n",
        "scripts/run_stage2.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_this_repository_has_no_problem(table: CommandTable) -> None:
    found = lint(ROOT, table)
    assert [str(problem) for problem in found.problems] == []
    assert set(found.skills) == {"translate-model", "validate-equivalence", "audit-port", "debug-component"}
    assert {"orchestrator", "planner", "nxdi-block-translator", "scaffolder", "weight-mapper", "equivalence-debugger",
            "port-auditor"} <= set(found.agents)  # fmt: skip
    assert found.commands > 40


def test_a_plugin_without_a_fault(plugin: Path, table: CommandTable) -> None:
    found = lint(plugin, table)
    assert (found.problems, found.commands) == ((), 3)


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        text = (root / file).read_text()
        assert old in text
        (root / file).write_text(text.replace(old, new))

    return edit


def added(file: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / file).write_text((root / file).read_text() + text) and None


SKILL, AGENT, PAGE = "skills/count-things/SKILL.md", "agents/counter.md", "references/page.md"


@pytest.mark.parametrize(
    ("edit", "file", "rule", "says"),
    [
        (replaced(SKILL, "name: count-things", "name: count"), SKILL, "frontmatter", "'count', the path says"),
        (replaced(SKILL, "---\nname", "name"), SKILL, "frontmatter", "is missing"),
        (replaced(SKILL, "description: Counts", "description: [Counts"), SKILL, "frontmatter", "no YAML"),
        (replaced(SKILL, "Counts things, for those who want to know how many there are.", "x"), SKILL, "frontmatter",
         "description"),
        (replaced(SKILL, "name: count", "allowed-tools: Bash\nname: count"), SKILL, "frontmatter", "grants"),
        (replaced(SKILL, "name: count", "nmae: x\nname: count"), SKILL, "frontmatter", "unknown key 'nmae'"),
        (added(SKILL, "line\n" * 200), SKILL, "size", "stays below 200"),
        (added(PAGE, "line\n" * 400), PAGE, "size", "stays below"),
        (lambda root: (root / SKILL).rename(root / "skills/count-things/skill.md"), "skills/count-things",
         "frontmatter", "no SKILL.md"),
        (replaced(AGENT, "tools: Read, Grep\n", ""), AGENT, "frontmatter", "tools"),
        (replaced(AGENT, "name: counter", "name: other"), AGENT, "frontmatter", "'other'"),
        (replaced(AGENT, "description: Counts what it is shown, and says so.\n", ""), AGENT, "frontmatter",
         "description"),
        (replaced(SKILL, "page.md#", "pages.md#"), SKILL, "link", "leads nowhere"),
        (replaced(SKILL, "#how-to-count", "#how-not-to"), SKILL, "link", "no heading"),
        (added(SKILL, "\n[out](../../../elsewhere.md)\n"), SKILL, "link", "leads nowhere"),
        (added(SKILL, "\nRun `scripts/run_stage99.py`.\n"), SKILL, "command", "no command `run_stage99.py`"),
        (added(SKILL, "\nSee `references/gone.md`.\n"), SKILL, "path", "no references/gone.md"),
        (added(SKILL, "\n`equiport prove EXP_DIR`\n"), SKILL, "command", "no command `equiport prove`"),
        (added(SKILL, "\n`equiport bench nothing`\n"), SKILL, "command", "no command `equiport bench nothing`"),
        (added(SKILL, "\n`equiport validate --thru 6`\n"), SKILL, "command", "has no flag --thru"),
        (added(SKILL, "\n```bash\ncd x && equiport port $HF_DIR\n```\n"), SKILL, "command", "needs --out"),
        (added(SKILL, "\n```bash\nequiport report\n```\n"), SKILL, "command", "needs 1 arguments"),
        (added(SKILL, "\n```bash\nequiport report a b\n```\n"), SKILL, "command", "takes 1 arguments, here are 2"),
        (replaced(SKILL, "--tau-r 1.2", "--tau 1.2"), SKILL, "command", "has no flag --tau"),
        (replaced(SKILL, "--tests-dir $EXP_DIR/tests ", ""), SKILL, "command", "needs --tests-dir"),
        (added(SKILL, "\n```\nwhat is it?\n```\n"), SKILL, "code", "without a language"),
        (added(SKILL, "\n```python\ndef f(:\n```\n"), SKILL, "code", "is no python"),
        (added(SKILL, "\n```json\n{'a': 1}\n```\n"), SKILL, "code", "is no json"),
        (replaced(SKILL, "`counter`", "somebody"), AGENT, "reach", "no skill leads here"),
        (replaced(SKILL, "[the page](../../references/page.md#how-to-count)", "no page"), PAGE, "reach", "leads"),
        (replaced(".claude-plugin/plugin.json", __version__, "99"), ".claude-plugin/plugin.json", "plugin", "99"),
        (lambda root: (root / ".claude-plugin/plugin.json").unlink(), ".claude-plugin/plugin.json", "plugin", "read"),
    ],
)  # fmt: skip
def test_each_fault_is_found(
    plugin: Path, table: CommandTable, edit: Callable[[Path], object], file: str, rule: str, says: str
) -> None:
    edit(plugin)
    found = [problem for problem in lint(plugin, table).problems if problem.file == file]
    assert [problem for problem in found if problem.rule == rule and says in problem.message], found


@pytest.mark.parametrize(
    "text",
    [
        "`equiport port MODEL --engine recipes|agent|auto ... [--through N]`",
        "`equiport.cli` holds the verbs, `equiport` is the command.",
        "```bash\nFOO=1 equiport doctor | cat; ls --thru\n```",
        "```bash\npython ${CLAUDE_PLUGIN_ROOT}/scripts/run_calibration.py --stage2-outputs a b c --output=t.json\n```",
        "```text\nequiport anything --at all\n```",
        "`run_stage4.py --draft`",
    ],
)
def test_what_is_right_is_left_alone(plugin: Path, table: CommandTable, text: str) -> None:
    added(SKILL, f"\n{text}\n")(plugin)
    (plugin / "scripts/run_calibration.py").touch()
    assert lint(plugin, table).problems == ()


def test_flags_are_asked_of_the_commands(table: CommandTable) -> None:
    """A flag that no list knows: what a verb takes comes from the verb."""
    assert table["equiport", "validate"].flags["--through"] is True
    assert table["equiport", "validate"].flags["--force"] is False
    assert table["run_stage0.py",].required[0] == ("--source-model-path",)
    assert table["nxdi_compiled_loader.py",].flags["--load"] is False
    assert ("--compiled-model-path",) in table["nxdi_compiled_loader.py",].required
    assert "tensor_compare.py" not in {name[0] for name in table}


def test_the_command(plugin: Path) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        done = subprocess.run(equiport_command("skills", "lint", *arguments), capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run(plugin)[:2] == (0, "1 skills, 1 agents, 3 pages, 3 commands; 0 problems\n")
    added(SKILL, "\n`equiport prove EXP_DIR`\n")(plugin)
    code, out, _ = run(plugin)
    assert code == 1 and f"{SKILL}:16: command: there is no command `equiport prove`" in out
    shutil.rmtree(plugin / "skills")
    code, _, err = run(plugin)
    assert code == 2 and err.startswith("equiport: ") and "no folder skills/" in err


def test_a_page_that_is_no_text(plugin: Path, table: CommandTable) -> None:
    (plugin / PAGE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(EquiportError, match=r"page\.md.*cannot be read"):
        lint(plugin, table)
