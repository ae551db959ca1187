"""The command line: one file a verb. Verbs are imported when they are called, so that --help costs nothing."""

from __future__ import annotations

import typer

from equiport import __version__
from equiport.cli import audit, bench, deploy, doctor, embeddings, inspect, plan, port, report, skills, validate

app = typer.Typer(
    name="equiport",
    help="Port HuggingFace models to AWS Neuron, and prove or disprove that the port computes the same function.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("plan", help=plan.HELP)(plan.plan)
app.command("port", help=port.HELP)(port.port)
app.command("inspect", help=inspect.HELP)(inspect.inspect)
app.command("audit", help=audit.HELP)(audit.audit)
app.command("validate", help=validate.HELP)(validate.validate)
app.command("embeddings", help=embeddings.HELP)(embeddings.embeddings)
app.command("report", help=report.HELP)(report.report)
app.add_typer(bench.app, name="bench")
app.add_typer(skills.app, name="skills")
app.command("deploy", help=deploy.HELP)(deploy.deploy)
app.command("doctor", help=doctor.HELP)(doctor.doctor)


def _version(value: bool) -> None:
    if value:
        print(f"equiport {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it.")) -> None:
    """Options before the verb."""


def main() -> None:
    """Entry point of the `equiport` command."""
    app()
