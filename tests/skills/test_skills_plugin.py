"""The real agent CLI loads this repository as a plugin, and what `equiport deploy` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agents.loopback import Ask, Loopback, call

from equiport.content import content_dir
from equiport.deploy.install import apply_install, plan_install
from equiport.skills.session import SessionSettings, run_session

ROOT = content_dir("skills").parent
SKILLS = {path.name for path in (ROOT / "skills").iterdir()}
AGENTS = {path.stem for path in (ROOT / "agents").glob("*.md")}


def test_every_skill_and_agent_is_listed(agent_cli: Loopback, tmp_path: Path) -> None:
    agent_cli.script = lambda ask: "Here."
    (tmp_path / "work").mkdir()
    end = run_session("Who is here?", tmp_path / "work", SessionSettings(plugin=ROOT))
    assert (end.error, end.text, end.plugin_errors) == ("", "Here.", ())
    assert {f"equiport:{name}" for name in SKILLS} <= set(end.skills)
    assert {f"equiport:{name}" for name in AGENTS} <= set(end.agents)


def test_a_skill_is_read_with_paths_that_exist(agent_cli: Loopback, tmp_path: Path) -> None:
    """`${CLAUDE_PLUGIN_ROOT}` of a skill's page is expanded by the CLI, and the page comes whole."""
    heard: list[str] = []

    def script(ask: Ask) -> list[dict[str, Any]] | str:
        if ask.turn == 0:
            return [call("Skill", skill="equiport:validate-equivalence")]
        heard.extend(part["text"] for message in ask.body["messages"] if message["role"] == "user"
                     for part in message["content"] if isinstance(part, dict) and part["type"] == "text")  # fmt: skip
        return "Read."

    agent_cli.script = script
    (tmp_path / "work").mkdir()
    end = run_session("Load the skill.", tmp_path / "work", SessionSettings(plugin=ROOT))
    page = "\n".join(heard)
    assert end.error == "" and "# Validate equivalence" in page
    assert f"{ROOT}/scripts/" in page and "CLAUDE_PLUGIN_ROOT" not in page
    assert "Give the user the headline, word for word" in page


def test_a_subagent_of_the_plugin_has_its_few_tools(agent_cli: Loopback, tmp_path: Path) -> None:
    tools: dict[str, set[str]] = {}

    def script(ask: Ask) -> list[dict[str, Any]] | str:
        if "x-claude-code-agent-id" in ask.headers:
            tools["auditor"] = set(ask.tools)
            return "Nothing found."
        if ask.turn == 0:
            return [call("Agent", description="review", subagent_type="equiport:port-auditor", prompt="Read port/.")]
        return "Reviewed."

    agent_cli.script = script
    (tmp_path / "work").mkdir()
    end = run_session("Review.", tmp_path / "work", SessionSettings(plugin=ROOT))
    assert (end.error, end.text) == ("", "Reviewed.")
    assert tools["auditor"] == {"Read", "Glob", "Grep"}


def test_what_deploy_installs_is_listed(agent_cli: Loopback, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    apply_install(plan_install("claude", ROOT, work / ".claude", force=False))
    agent_cli.script = lambda ask: "Here."
    end = run_session("Who is here?", work, SessionSettings(sources=("project",)))
    assert end.error == ""
    assert set(end.skills) >= SKILLS and set(end.agents) >= AGENTS
