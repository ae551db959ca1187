"""`equiport bench families`: every family that recipes serve, through the whole pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, NxdiSource, NxdSource

HELP = """Port and validate a tiny model of each family; print seconds, R32, R and verdict.

Examples:
  equiport bench families --quick
  equiport bench families --family gemma2 --output families.json
  equiport bench families --nxdi-src NXDI --nxd-src NXD

With the real packages' sources (flags, or EQUIPORT_NXDI_SRC and EQUIPORT_NXD_SRC; transformers 4.57.*) each port is
also validated on them, and the logits of both are compared. A family takes about two minutes a tier; --quick judges
stage 0, components of one seed and logits in one process a tier, seconds a family, without the variants of a family.
Exit 0 only when every family passes; 1 otherwise; 2 bad input.
"""


def families(
    family: Annotated[str, typer.Option(help="One family, or one configuration of it.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Stage 0, components and logits alone.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the table here as JSON.")] = None,
    nxdi_src: NxdiSource = None,
    nxd_src: NxdSource = None,
    work: Annotated[Path | None, typer.Option(help="Keep models, ports and experiments here.")] = None,
    debug: Debug = False,
) -> None:
    """Run the table."""

    def action() -> int:
        from equiport.bench.commands import given_sources
        from equiport.bench.families import FamiliesBench, FamiliesTable, FamilyRow, lines_of, run_families
        from equiport.bench.family_models import family_names
        from equiport.errors import ExitCode
        from equiport.experiment.atomic import write_json

        names = family_names(family, variants=not quick)
        bench = FamiliesBench(names, given_sources(nxdi_src, nxd_src), quick, work)
        print(lines_of(())[0], flush=True)

        def say(row: FamilyRow) -> None:
            print("\n".join(lines_of([row], head=False)), flush=True)

        table: FamiliesTable = run_families(bench, say)
        if output is not None:
            write_json(output, {**table.model_dump(), "passed": table.passed})
        failed = [row.family for row in table.rows if not row.passed]
        print(
            f"{len(table.rows) - len(failed)} of {len(table.rows)} pass"
            + (f"; not: {'; '.join(failed)}" if failed else "")
        )
        return int(ExitCode.PASS if table.passed else ExitCode.FAIL)

    run_command(action, debug=debug)
