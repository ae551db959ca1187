"""`equiport bench`: figures over many ports. One file a sub-command, imported when it is called."""

from __future__ import annotations

import typer

from equiport.cli import bench_audit, bench_families, bench_fidelity, bench_portbugs, bench_ports

HELP = "Figures over many ports: tables on the screen, and JSON with --output."

app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("audit", help=bench_audit.HELP)(bench_audit.audit)
app.command("families", help=bench_families.HELP)(bench_families.families)
app.command("fidelity", help=bench_fidelity.HELP)(bench_fidelity.fidelity)
app.command("ports", help=bench_ports.HELP)(bench_ports.bench_ports)
app.command("portbugs", help=bench_portbugs.HELP)(bench_portbugs.portbugs)


@app.callback()
def _bench() -> None:
    """Keeps the sub-command's name, also while there is one alone."""
