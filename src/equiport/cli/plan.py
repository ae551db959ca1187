"""`equiport plan`: what a model is, and what a port of it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet

HELP = """Plan a port: write port_plan.json and PORT_PLAN.md.

Examples:
  equiport plan HF_DIR --stack nxdi --out plan
  equiport plan HF_DIR --stack nxdi --out plan --answers plan/answers.json

config.json alone suffices. Where config, source text and a measured small model disagree, or a config key that the
source reads is accounted for by nothing, a question is asked: exit 3, and OUT/answers.json is there to be filled in.
Exit 0: planned, parts that are not translated are named. 2: bad input.
"""


def plan(
    model: Annotated[Path, typer.Argument(help="HuggingFace folder of the source model.")],
    stack: Annotated[str, typer.Option(help="Serving stack to port to.")] = "nxdi",
    out: Annotated[Path, typer.Option(help="Folder to write the plan into.")] = Path("port"),
    answers: Annotated[Path | None, typer.Option(help="Answers file of an earlier run.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the modeling code that the folder brings.")
    ] = False,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Write the plan of a port."""

    def action() -> int:
        from equiport.errors import ExitCode
        from equiport.port.fingerprint_reader import fingerprint
        from equiport.port.plan import plan as make_plan
        from equiport.port.plan_render import write_plan_page
        from equiport.port.plan_schema import write_plan
        from equiport.port.plan_substitution import primitives_of
        from equiport.port.port_out import check_out
        from equiport.port.questions import ANSWERS_NAME, read_answers, write_answers

        primitives_of(stack)
        check_out(out)
        found = fingerprint(model, trust_remote_code=trust_remote_code)
        given = read_answers(answers, found.questions) if answers else {}
        made = make_plan(found, stack, given)
        write_plan(out, made)
        page = write_plan_page(out, made)
        if not quiet:
            print(f"{found.architecture}: {made.routing}")
            for part in made.unsupported:
                print(f"  not translated: {part.what} ({part.why})")
            if made.missing_recipes:
                print(f"  no recipe for: {', '.join(made.missing_recipes)}")
            print(f"plan: {page}")
        if made.open_questions:
            file = write_answers(out / ANSWERS_NAME, found.questions, given)
            for question in made.open_questions:
                print(f"open question {question.id}: {question.question}")
            print(
                f"INCONCLUSIVE: {len(made.open_questions)} open; fill in {file}, then run again with --answers {file}"
            )
            return int(ExitCode.INCONCLUSIVE)
        if made.stopped_by:
            print(f"INCONCLUSIVE: stopped by the answer to {', '.join(made.stopped_by)}")
            return int(ExitCode.INCONCLUSIVE)
        return int(ExitCode.PASS)

    run_command(action, debug=debug)
