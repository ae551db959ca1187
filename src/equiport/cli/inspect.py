"""`equiport inspect`: what a port is, which source model it belongs to, and what can be validated of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug

if TYPE_CHECKING:
    from equiport.intake.inspection import PortInspection

HELP = """Say what a port is: its classes, its HuggingFace counterpart, its kind, and what is validated of it.

Examples:
  equiport inspect modeling_x.py
  equiport inspect modeling_x.py --model HF_DIR --out EXP_DIR

Nothing of the port is run. --out writes equiv_config.json for `equiport validate EXP_DIR`. Without --model, sizes and
switches come from the default config of the counterpart. Exit 3 where several classes or models fit: the flag that
settles it is named. Exit 2: bad input, or --out for a port that the stages cannot run.
"""
_SIZES = (
    "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "num_layers", "num_attention_heads", "n_head",
    "num_heads", "attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "intermediate_size", "n_inner",
    "ffn_dim", "vocab_size", "sliding_window", "window_size", "num_experts", "num_local_experts", "n_routed_experts",
    "layer_types", "tie_word_embeddings",
)  # fmt: skip


def inspect(
    port: Annotated[Path, typer.Argument(help="The port's modeling file.")],
    model: Annotated[
        Path | None, typer.Option(help="HuggingFace folder of the source model, or its config.json.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Experiment directory to write equiv_config.json into.")] = None,
    inner_class: Annotated[str | None, typer.Option(help="Inner model class, when several fit.")] = None,
    causal_class: Annotated[str | None, typer.Option(help="ForCausalLM class, when several fit.")] = None,
    config_class: Annotated[str | None, typer.Option(help="InferenceConfig class, when several fit.")] = None,
    debug: Debug = False,
) -> None:
    """Inspect a port."""

    def action() -> int:
        from equiport.intake.inspection import inspect_port

        found = inspect_port(
            port, model=model, inner_class=inner_class, causal_class=causal_class, config_class=config_class
        )
        _print(found, default=model is None)
        if out is not None:
            print(f"written: {_write(found, model, out)}")
        return 0

    run_command(action, debug=debug)


def _print(found: PortInspection, *, default: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    classes = found.classes
    rows = [
        ("port", str(found.port)),
        ("kind", found.kind.value),
        ("classes", f"{classes.causal}, {classes.inner}, {classes.config}" if classes else "none for the stages"),
        ("source", f"{found.hf_class or 'no causal LM'} ({found.model_type})" if found.model_type else "not known"),
    ]
    if found.tiny is not None:
        sizes = [f"{name} {_shown(found.tiny[name])}" for name in _SIZES if found.tiny.get(name) is not None]
        rows.append(("tiny config", ("default config, shrunk: " if default else "shrunk: ") + ", ".join(sizes)))
    rows += [("validated", text) for text in (found.validated if found.obstacle is None else ()) or ("nothing",)]
    rows += [("not validated", text) for text in found.not_validated]
    rows += [("note", text) for text in found.notes]
    rows.append(("runs", "as far as reading tells" if found.obstacle is None else f"no: {found.obstacle}"))
    last = ""
    for name, text in rows:
        table.add_row("" if name == last else name, escape(text))
        last = name
    Console(soft_wrap=False).print(table)


def _shown(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _write(found: PortInspection, model: Path | None, out: Path) -> Path:
    """equiv_config.json of an experiment on this port.

    Raises:
        EquiportError: the stages cannot run on it, or the folder cannot be written.
    """
    from equiport.experiment.config import CONFIG_NAME
    from equiport.intake.experiment import check_runnable, write_source
    from equiport.stacks.detection import detect_stack
    from equiport.stages.frame import StageOptions, Subject
    from equiport.stages.stage0 import write_config

    check_runnable(found)
    assert found.classes is not None
    stack = detect_stack(found.port)
    source = model if model is not None and model.is_dir() else write_source(found, out)
    out.mkdir(parents=True, exist_ok=True)
    write_config(out, Subject(source.absolute(), found.classes, stack, 1), StageOptions(), 6)
    return out / CONFIG_NAME
