"""`equiport port`: plan, units, scaffold, weights, all stages, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, NxdiSource, NxdSource, Quiet, use_sources

HELP = """Port a HuggingFace model: plan it, translate its units, assemble the port, prove it.

Examples:
  equiport port HF_DIR --stack nxdi --out PORT_DIR
  equiport port HF_DIR --out PORT_DIR --answers answers.json
  equiport port HF_DIR --out PORT_DIR --engine auto --budget-usd 20
The same command goes on where an interrupted one stopped; what is done is not repeated.

--engine auto: recipes where they fit, agents for blocks that no recipe knows; agent: every unit by agents. Agents need
`pip install 'equiport[agent]'` and a key (ANTHROPIC_API_KEY); each works in a folder of its own and runs nothing.
Costs and tokens are printed and kept in port_state.json, conversations in PORT_DIR/agents.

Checks: every unit's test in a process of its own, the weight conversion both ways, then the stages of `validate`.
Common errors: "open questions" (answer them in a file, give it with --answers), "no recipe for block" (the block is
named: --engine auto asks an agent), "the budget does not suffice" (run again with a larger one; it goes on).

Exit 0 only on PASS; 1 FAIL, 2 bad input, 3 questions open or inconclusive, 4 incomplete (budget spent, no answer).
"""


def port(
    model: Annotated[Path, typer.Argument(help="HuggingFace folder: config.json, with or without weights.")],
    out: Annotated[Path, typer.Option(help="Folder of the port; made, or continued.")],
    stack: Annotated[str, typer.Option(help="Serving stack.")] = "nxdi",
    engine: Annotated[str, typer.Option(help="Who translates: recipes, agent or auto.")] = "recipes",
    answers: Annotated[Path | None, typer.Option(help="Answers to the plan's open questions.")] = None,
    exp_dir: Annotated[Path | None, typer.Option("--exp-dir", help="Experiment. [default: OUT/exp]")] = None,
    through: Annotated[int | None, typer.Option(help="Last stage that counts. [7 with a tokenizer, else 6]")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="What agents may cost in all. [no limit]")] = None,
    unit_budget_usd: Annotated[float, typer.Option(help="What agents may cost for one unit.")] = 3.0,
    max_turns: Annotated[int, typer.Option(help="Turns that an agent may take for one job.")] = 60,
    attempts: Annotated[int, typer.Option(help="Attempts at a unit, or at a patch, before it is given up.")] = 3,
    agent_model: Annotated[str | None, typer.Option(help="Full id of the model that agents run on.")] = None,
    patch: Annotated[bool, typer.Option(help="Let an agent patch a port whose components fail (stage 4).")] = True,
    review: Annotated[bool, typer.Option(help="Have an agent review the port; advisory.")] = True,
    nxdi_src: NxdiSource = None,
    nxd_src: NxdSource = None,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Run the phases that are not done."""

    def action() -> int:
        from equiport.port.agent_limits import AgentLimits
        from equiport.port.port_run import PortOptions, run_port

        use_sources(nxdi_src, nxd_src)
        limits = AgentLimits(attempts, unit_budget_usd, budget_usd, max_turns, model=agent_model)
        return run_port(
            PortOptions(
                model, out, stack, engine, answers, exp_dir, through, quiet, debug, limits, patch=patch, review=review
            )
        )

    run_command(action, debug=debug)
