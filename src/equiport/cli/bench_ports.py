"""`equiport bench ports`: ports that nobody here wrote, each through the CPU stages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, NxdiSource, NxdSource

HELP = """Validate every port of a tree against its HF counterpart; print verdict, first bad component and cause.

Examples:
  equiport bench ports --tree DIR
  equiport bench ports --nxdi-src NXDI --nxd-src NXD --work DIR --output ports.json
  equiport bench ports --nxdi-src NXDI --nxd-src NXD --ports gemma-2-9b --ports "OLMo*"

Ports are those of contrib/models beside NXDI, or of --tree (`<name>/src/modeling_*.py`). Counterparts are tiny, their
weights drawn; --models DIR: `DIR/<name>/config.json` says what its counterpart is where a port does not. With
the real packages' sources (transformers 4.57.*) they run on them, else on the stand-in. With --work a second run
resumes. A port takes about two minutes; --quick judges stage 0, components of three seeds and logits in one process,
and looks for causes. Exit 0 when every port has its row, whatever it says; 2 bad input.
"""


def bench_ports(
    nxdi_src: NxdiSource = None,
    nxd_src: NxdSource = None,
    ports: Annotated[list[str] | None, typer.Option(help="A port's name, or a pattern; may be repeated.")] = None,
    tree: Annotated[Path | None, typer.Option(help="Folder of ports in place of the contributed ones.")] = None,
    models: Annotated[Path | None, typer.Option(help="Folder of counterparts' configs, by port.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Stage 0, components, causes and logits alone.")] = False,
    work: Annotated[Path | None, typer.Option(help="Keep models and experiments here, and resume.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Ports side by side.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Also write the table here as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Run the table."""

    def action() -> int:
        from equiport.bench.commands import given_sources
        from equiport.bench.fidelity import contributed
        from equiport.bench.port_table import PortVerdict, lines_of
        from equiport.bench.ports import PortsBench, run_ports
        from equiport.errors import EquiportError, ExitCode
        from equiport.experiment.atomic import write_json

        sources = given_sources(nxdi_src, nxd_src)
        if tree is None and not sources:
            raise EquiportError(
                "no ports are given", field="--tree", remedy="Give --tree, or --nxdi-src and --nxd-src."
            )
        folder = tree or contributed(Path(next(iter(sources.values()))))
        print(lines_of(())[0], flush=True)

        def say(row: PortVerdict) -> None:
            print("\n".join(lines_of([row], head=False)), flush=True)

        table = run_ports(PortsBench(folder, sources, tuple(ports or ()), models, work, jobs, quick), say)
        if output is not None:
            write_json(output, table)
        counts = Counter(row.verdict for row in table.rows)
        print(f"{len(table.rows)} ports, {table.tree}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
        return int(ExitCode.PASS)

    run_command(action, debug=debug)
