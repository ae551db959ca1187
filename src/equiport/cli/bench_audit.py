"""`equiport bench audit`: what the audit finds and what it flags, rule by rule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug

HELP = """Audit a corpus of cheating and of honest tests and ports; print detection and false positives by rule.

Examples:
  equiport bench audit --quick
  equiport bench audit --output audit_bench.json
  equiport bench audit --tree NXDI/contrib/models --output contributed.json

Cheats: every rule's own samples, and others that no rule was written with. Honest: small ones, ports and tests written
by hand in the style of contributed ones, and what the recipes generate for every family (--quick: for three). Nothing
of the corpus is run. With --tree the folders of somebody else's ports are audited instead, each by itself.
Exit 0 only when every cheat is found and no honest file flagged (--tree: no crash, each folder in under five seconds);
1 otherwise; 2 bad input.
"""


def audit(
    quick: Annotated[bool, typer.Option("--quick", help="Generated ports of three families.")] = False,
    tree: Annotated[Path | None, typer.Option(help="Audit the folders in here instead of the corpus.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the table here as JSON.")] = None,
    debug: Debug = False,
) -> None:
    """Run the corpus."""

    def action() -> int:
        from equiport.bench.audit.run import AuditBench, run_audit_bench
        from equiport.bench.audit.table import lines_of
        from equiport.bench.audit.trees import run_tree, tree_lines
        from equiport.errors import ExitCode
        from equiport.experiment.atomic import write_json

        if tree is not None:
            found = run_tree(tree, lambda text: print(text, flush=True))
            if output is not None:
                write_json(output, {"passed": found.passed, **found.model_dump()})
            print("\n".join(["", *tree_lines(found)]))
            return int(ExitCode.PASS if found.passed else ExitCode.FAIL)
        table = run_audit_bench(AuditBench(quick=quick), lambda text: print(text, flush=True))
        if output is not None:
            write_json(output, {"passed": table.passed, **table.model_dump()})
        print("\n".join(lines_of(table)))
        return int(ExitCode.PASS if table.passed else ExitCode.FAIL)

    run_command(action, debug=debug)
