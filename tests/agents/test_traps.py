"""What is known to go wrong around the SDK, and where it is met.

1 a hook that raises lets the tool run: test_sdk_backend.test_a_guard_that_fails_refuses, test_guard
2 a success may be an error, or lack its answer: test_errors_of_the_api, test_an_answer_without_structure_is_none
3 query() raises after an error's result: test_endless_turns_end, test_a_budget_ends_a_job keep turns and cost
4 costs add up over a session, budgets overshoot: test_a_session_goes_on_and_its_cost_counts_all_of_it, and below
5 path hooks do not see Bash: below, and test_reads_elsewhere_and_other_tools_are_refused
6 a subagent may widen permissions, 7 its tool has two names: the same test; no job has either
8 too many processes at once: test_units.test_units_run_side_by_side_under_a_cap, a barrier in test_whole_port
9 pages without name or description are dropped: test_prompts
10 the repository root is a plugin: below
11 a cassette library pins old versions: below
12 options do not reach a custom transport: test_what_the_model_is_given, through the real command line
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from equiport.agents import sdk_backend
from equiport.agents.prompts import load_prompt
from equiport.content import content_dir

from .conftest import job
from .loopback import Loopback

ROOT = content_dir("agents").parent


def test_4_tokens_count_subagents(tmp_path: Path, workspace: Path) -> None:
    class ResultMessage(SimpleNamespace):
        pass

    usage = {"inputTokens": 10, "outputTokens": 5, "cacheReadInputTokens": 2, "cacheCreationInputTokens": 1}
    heard = sdk_backend._Heard(tmp_path / "t.jsonl")
    heard.take(
        ResultMessage(
            subtype="success", is_error=False, stop_reason="end_turn", api_error_status=None, errors=None, result="x",
            structured_output=None, total_cost_usd=0.25, num_turns=3, session_id="s", usage={"input_tokens": 10},
            model_usage={"one": usage, "of a subagent": usage},
        )
    )  # fmt: skip
    ended = heard.result(job(workspace), [], None, "")
    assert (ended.tokens.given, ended.tokens.made, ended.tokens.cached) == (20, 10, 6) and ended.cost_usd == 0.25


def test_5_6_7_no_agent_of_the_engine_runs_anything() -> None:
    pages = [path.stem for path in content_dir("agents").glob("*.md") if path.stem != "orchestrator"]
    assert len(pages) == 6
    for name in pages:
        assert not {"Bash", "Agent", "Task", "WebFetch", "Skill"} & set(load_prompt(name).tools)
    assert {"Bash", "Agent", "Task"} <= set(sdk_backend._NEVER)


def test_10_the_repository_is_a_plugin_whose_agents_are_listed(model: Loopback, alone: Path, workspace: Path) -> None:
    import claude_agent_sdk as sdk

    from equiport.agents.environment import process_environment

    variables = {"ANTHROPIC_API_KEY": "not-a-key", "ANTHROPIC_BASE_URL": model.url}
    options = sdk.ClaudeAgentOptions(
        cwd=workspace, setting_sources=[], plugins=[{"type": "local", "path": str(ROOT)}], max_turns=1,
        env=process_environment(variables, alone / "cli"),
    )  # fmt: skip

    async def first() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async for message in sdk.query(prompt="hello", options=options):
            if isinstance(message, sdk.SystemMessage) and message.subtype == "init":
                found = message.data
        return found

    told = asyncio.run(first())
    assert not told.get("plugin_errors"), told.get("plugin_errors")
    ours = {f"equiport:{path.stem}" for path in content_dir("agents").glob("*.md")}
    assert ours <= set(told["agents"]), json.dumps(told["agents"])


def test_11_no_cassettes() -> None:
    assert "cassette" not in (ROOT / "pyproject.toml").read_text()
