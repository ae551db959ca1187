"""`equiport bench fidelity`: the stand-in against the real packages, on ports that nobody here wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, NxdiSource, NxdSource

HELP = """Run ports on the stand-in and on the real packages; print how far their logits are apart.

Examples:
  equiport bench fidelity --nxdi-src NXDI --nxd-src NXD
  equiport bench fidelity --nxdi-src NXDI --nxd-src NXD --ports "OLMo*" --ports gpt2 --quick
  equiport bench fidelity --nxdi-src NXDI --nxd-src NXD --work DIR --output fidelity.json

Each port loads the same tiny counterpart of HuggingFace on both tiers: a prefill of three prompts of unequal length and
six decode steps, in fp32 and bf16 (--quick: fp32). Beside it: the real packages against HuggingFace in fp32. Ports are
those of contrib/models beside NXDI, or of --tree (`<name>/src/modeling_*.py`). --models DIR: `DIR/<name>/config.json`
says what a port's counterpart is where the port does not. With --work a second run takes what is still true from the
first. Exit 0 when all ports that ran on both are within the limits (1e-5 in fp32, 1e-2 in bf16); 1 when one is not; 3
when no port ran on both; 2 bad input.
"""


def fidelity(
    nxdi_src: NxdiSource = None,
    nxd_src: NxdSource = None,
    ports: Annotated[list[str] | None, typer.Option(help="A port's name, or a pattern; may be repeated.")] = None,
    tree: Annotated[Path | None, typer.Option(help="Folder of ports in place of the contributed ones.")] = None,
    models: Annotated[Path | None, typer.Option(help="Folder of counterparts' configs, by port.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fp32 alone.")] = False,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one port may take on one tier.")] = 180.0,
    work: Annotated[Path | None, typer.Option(help="Keep models and logits here, and resume.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the table here as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Run the table."""

    def action() -> int:
        from equiport.bench.commands import given_sources
        from equiport.bench.fidelity import FidelityBench, run_fidelity
        from equiport.bench.fidelity_table import FidelityRow, lines_of, summary_lines
        from equiport.errors import ExitCode
        from equiport.experiment.atomic import write_json

        sources = given_sources(nxdi_src, nxd_src)
        bench = FidelityBench(sources, tree, tuple(ports or ()), models, quick, work, limit)
        head = lines_of(())

        def say(row: FidelityRow) -> None:
            while head:
                print(head.pop(0))
            print("\n".join(lines_of([row], head=False)), flush=True)

        table = run_fidelity(bench, say)
        if output is not None:
            write_json(output, {**table.model_dump(), "summary": table.summary(), "passed": table.passed})
        print("\n".join(summary_lines(table)))
        if not any(row.compared for row in table.rows):
            return int(ExitCode.INCONCLUSIVE)
        return int(ExitCode.PASS if table.passed else ExitCode.FAIL)

    run_command(action, debug=debug)
