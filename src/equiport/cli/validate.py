"""`equiport validate`: all stages with gates, progress and resume, ending in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Force, NxdiSource, NxdSource, Quiet, ThresholdsFile, use_sources
from equiport.warm import FOR_STAGES, warm_server

HELP = """Validate a port: run the stages in order, resume what is done, write EQUIVALENCE_REPORT.md.

Examples:
  equiport validate --port modeling_x.py --model HF_DIR --out EXP_DIR
  equiport validate --port modeling_x.py --out EXP_DIR    (a tiny model by the counterpart's default config)
  equiport validate EXP_DIR
  equiport validate EXP_DIR --from 2
  equiport validate EXP_DIR --nxdi-src NXDI --nxd-src NXD    (on the real packages in CPU mode; stamped in the results)

Exit 0 only on PASS; 1 FAIL, 2 bad input, 3 inconclusive or a question open, 4 incomplete.
"""


def validate(
    exp_dir: Annotated[Path | None, typer.Argument(help="An existing experiment directory.")] = None,
    port: Annotated[Path | None, typer.Option(help="The port's modeling file.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="HuggingFace folder of the source model, or a config.json: then a tiny one is drawn."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Experiment directory to make or resume.")] = None,
    inner_class: Annotated[str | None, typer.Option(help="Inner model class, when several fit.")] = None,
    causal_class: Annotated[str | None, typer.Option(help="ForCausalLM class, when several fit.")] = None,
    config_class: Annotated[str | None, typer.Option(help="InferenceConfig class, when several fit.")] = None,
    stack: Annotated[str | None, typer.Option(help="Serving stack; found from the imports.")] = None,
    tp_size: Annotated[
        int | None, typer.Option("--tp-size", min=1, help="Tensor-parallel degree. [default: 1]")
    ] = None,
    through: Annotated[int | None, typer.Option(help="Last stage that counts. [7 with a tokenizer, else 6]")] = None,
    first: Annotated[int, typer.Option("--from", help="Run again from this stage on.")] = 8,
    force: Force = False,
    thresholds: ThresholdsFile = None,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Annotated[int | None, typer.Option(help="Seed of tokens and weights. [default: 42]")] = None,
    nxdi_src: NxdiSource = None,
    nxd_src: NxdSource = None,
) -> None:
    """Run the stages that are not done."""

    def action() -> int:
        use_sources(nxdi_src, nxd_src)
        warm_server(FOR_STAGES).start()  # its imports go on beside ours
        from equiport.pipeline import PortGiven, open_or_make, run_pipeline

        given = PortGiven(port, model, out, inner_class, causal_class, config_class, stack, tp_size, thresholds, seed)
        experiment = open_or_make(exp_dir, given, through)
        return run_pipeline(experiment, first=0 if force else first, quiet=quiet, debug=debug)

    run_command(action, debug=debug)
