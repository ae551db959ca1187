"""`equiport embeddings`: does a target embed texts as its source model does?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, Quiet, ThresholdsFile

if TYPE_CHECKING:
    from equiport.stages.embedding_targets import EmbeddingTarget
    from equiport.stages.embeddings import EmbeddingOptions

HELP = """Compare the embeddings of a target with those of its source model.

Examples:
  equiport embeddings HF_DIR --url http://localhost:8000 --out embeddings
  equiport embeddings HF_DIR --write-plan plan.json        (what a stack without an endpoint has to embed)
  equiport embeddings HF_DIR --file vectors.safetensors    (what it gave)
  equiport embeddings HF_DIR --pooling last --normalize --url http://localhost:8000

The source is transformers' class on the CPU (bf16 and fp32). Pooling is read from modules.json and what it names; what
no file says is asked for. Checked: each prompt's cosine with the source, unrelated prompts against one another, lengths
of vectors, each prompt alone and in batches, and with other neighbours of the same lengths. --prompts: a text file,
one a line, or .json: a list of texts or lists of token ids. Python: equiport.stages.embeddings.run_embeddings with a
CallableTarget. Writes embeddings.json, EMBEDDINGS.md and the vectors into --out.

Exit 0: PASS. 1: FAIL. 2: bad input. 3: INCONCLUSIVE.
"""


def embeddings(
    model: Annotated[Path, typer.Argument(help="HuggingFace or sentence-transformers folder of the source model.")],
    url: Annotated[str | None, typer.Option(help="Server with an OpenAI-compatible /v1/embeddings.")] = None,
    file: Annotated[Path | None, typer.Option(help="safetensors with the target's vectors.")] = None,
    write_plan: Annotated[Path | None, typer.Option(help="Write what is to be embedded, for --file, and end.")] = None,
    pooling: Annotated[
        Literal["last", "mean", "cls"] | None, typer.Option(help="Pooling, where the folder's files do not say it.")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Length 1 or not, where no file says it.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts of your own, in place of the shipped ones.")] = None,
    target_dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="What the target computes in; fp32 is held to tighter limits.")
    ] = "bf16",
    batch_size: Annotated[int, typer.Option(min=2, help="Prompts a batch.")] = 8,
    served_model: Annotated[str, typer.Option(help="Name of the model at --url, where it serves several.")] = "",
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Send token ids to --url, not text.")] = False,
    key_env: Annotated[str, typer.Option(help="Environment variable that holds the key for --url.")] = "",
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a request to --url may take.")] = 120.0,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("embeddings"),
    thresholds: ThresholdsFile = None,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Compare embeddings."""

    def action() -> int:
        from equiport.reference.pooling import PoolingMode
        from equiport.stages.embeddings import EmbeddingOptions

        options = EmbeddingOptions(
            model,
            PoolingMode(pooling) if pooling else None,
            normalize,
            prompts,
            target_dtype,
            batch_size,
            thresholds,
            out,
            quiet,
        )
        _one_of(url, file, write_plan)
        if write_plan is not None:
            return _plan(options, write_plan)
        from equiport.stages.embedding_endpoint import EndpointTarget
        from equiport.stages.embedding_targets import FileTarget

        if file is not None:
            return _judge(options, FileTarget(file))
        return _judge(options, EndpointTarget(url or "", served_model, token_ids, key_env, timeout))

    run_command(action, debug=debug)


def _one_of(url: str | None, file: Path | None, write_plan: Path | None) -> None:
    from equiport.errors import EquiportError

    if sum(given is not None for given in (url, file, write_plan)) != 1:
        raise EquiportError(
            "one of --url, --file and --write-plan is needed", remedy="Say where the target's embeddings come from."
        )


def _plan(options: EmbeddingOptions, path: Path) -> int:
    from equiport.experiment.atomic import write_json
    from equiport.stages.embeddings import ask

    plan = ask(options).plan
    write_json(path, plan.as_json())
    print(f"{path}: {len(plan.items)} prompts in {len(plan.batches)} batches; `format` in it says what to hand in")
    return 0


def _judge(options: EmbeddingOptions, target: EmbeddingTarget) -> int:
    from equiport.report.embeddings import headline, write_embeddings_page
    from equiport.stages.embeddings import run_embeddings
    from equiport.stages.frame import exit_code

    assert options.out is not None
    result = run_embeddings(options, target)
    page = write_embeddings_page(options.out, result)
    for reason in sorted(result.reasons, key=lambda item: bool(item.subject))[:12]:  # the whole set's come first
        print(f"{reason.code}{' ' + reason.subject if reason.subject else ''}: {reason.message}")
    if len(result.reasons) > 12:
        print(f"... and {len(result.reasons) - 12} more")
    if not options.quiet:
        for hint in result.hints:
            print(f"hint: {hint}")
    print(headline(result))
    print(page)
    return exit_code(result.verdict)
