"""detect_class_divergence.py: a finding, not a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Output


def command(
    target_module_file: Annotated[Path, typer.Option(help="The port's modeling file.")],
    output: Output = None,
    debug: Debug = False,
) -> None:
    """List the places where the port picks another class on the CPU than on the device."""

    def action() -> int:
        from dataclasses import asdict

        from equiport.errors import EquiportError
        from equiport.experiment.atomic import write_json
        from equiport.stacks.detection import detect_stack
        from equiport.stacks.loading import load_adapter
        from equiport.structure.class_divergence import detect_class_divergence

        try:
            roots = load_adapter(detect_stack(target_module_file)).source_roots()
        except EquiportError:
            roots = ()
        found = detect_class_divergence(target_module_file, roots)
        for item in found:
            print(
                f"{item.file}:{item.line} {item.where} ({item.kind}): CPU {item.cpu_class}, device {item.device_class}"
            )
        print(f"{len(found)} class divergences")
        if output:
            write_json(output, [asdict(item) for item in found])
        return 0

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of detect_class_divergence.py."""
    typer.run(command)
