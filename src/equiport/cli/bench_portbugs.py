"""`equiport bench portbugs`: the corpus of porting bugs, executed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug

HELP = """Inject known porting bugs into real models and see which are detected, located and explained.

Examples:
  equiport bench portbugs --quick
  equiport bench portbugs --output portbugs.json
  equiport bench portbugs --only rotation --seed 3

Each case is a tiny model of a family with one defect, or a correct rewrite, judged by the gates of stages 0, 1, 2 and
5; beside it stands what the usual gates (greedy tokens, cosine, NMSE, KL, top-5, tolerance map, R) say of the same
port. A case takes about ten seconds a core; --quick runs a fixed handful. With --output a plot is written beside the
JSON file. Exit 0 only when every bug is detected and no rewrite flagged; 1 otherwise; 2 bad input.
"""


def portbugs(
    quick: Annotated[bool, typer.Option("--quick", help="A fixed handful.")] = False,
    only: Annotated[str, typer.Option(help="The bugs whose name holds this.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 1042,
    output: Annotated[Path | None, typer.Option(help="Write the cases here as JSON, and a plot beside it.")] = None,
    debug: Debug = False,
) -> None:
    """Run the corpus."""

    def action() -> int:
        from equiport.bench.portbugs.run import PortBugsBench, plot_portbugs, run_portbugs
        from equiport.bench.portbugs.table import line_of, lines_of, misses
        from equiport.errors import ExitCode
        from equiport.experiment.atomic import write_json

        bench = PortBugsBench(quick=quick, only=only, jobs=jobs, seed=seed)
        table = run_portbugs(bench, lambda case: print(line_of(case), flush=True))
        if output is not None:
            summary = table.summary().model_dump(mode="json")
            write_json(output, {"passed": table.passed, "summary": summary, **table.model_dump()})
            plot_portbugs(table, output.with_suffix(".png"))
        print("\n".join(["", *lines_of(table), *(f"  {text}" for text in misses(table.cases))]))
        return int(ExitCode.PASS if table.passed else ExitCode.FAIL)

    run_command(action, debug=debug)
