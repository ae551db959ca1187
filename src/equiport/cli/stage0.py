"""run_stage0.py: trees, mapping, class divergence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equiport.cli.entry import run_command
from equiport.cli.flags import Debug, ExpDir, Force, Quiet, Seed, ThresholdsFile


def command(
    source_model_path: Annotated[Path, typer.Option(help="HuggingFace folder of the source model.")],
    target_model_path: Annotated[Path, typer.Option(help="Folder whose config the port is built from.")],
    target_module_file: Annotated[Path, typer.Option(help="The port's modeling file.")],
    target_inner_class: Annotated[str, typer.Option(help="Inner model class (extends NeuronBaseModel).")],
    target_config_class: Annotated[str, typer.Option(help="InferenceConfig class.")],
    output_dir: Annotated[Path, typer.Option(help="Where the trees go; named model_tree, its parent is EXP_DIR.")],
    target_causal_class: Annotated[str | None, typer.Option(help="ForCausalLM class; found when left out.")] = None,
    target_stack: Annotated[str | None, typer.Option(help="Serving stack; found from the imports.")] = None,
    tp_size: Annotated[int, typer.Option(min=1)] = 1,
    exp_dir: ExpDir = None,
    thresholds: ThresholdsFile = None,
    force: Force = False,
    debug: Debug = False,
    quiet: Quiet = False,
    seed: Seed = 42,
) -> None:
    """Build model trees, propose or validate component_mapping.json by weight provenance, list class divergences.

    Example: run_stage0.py --source-model-path M --target-model-path M --target-module-file port.py
    --target-inner-class NeuronXModel --target-config-class XInferenceConfig --output-dir EXP/model_tree
    """

    def action() -> int:
        from equiport.errors import EquiportError
        from equiport.fixtures.folder import read_config
        from equiport.stacks.detection import detect_stack
        from equiport.stacks.loading import load_adapter
        from equiport.stacks.port_classes import find_port_classes
        from equiport.stages import stage0
        from equiport.stages.frame import StageOptions, Subject, exit_code

        read_config(source_model_path)
        if target_model_path.resolve() != source_model_path.resolve():
            raise EquiportError(
                "differs from --source-model-path",
                field="--target-model-path",
                remedy="Give the same folder: one set of weights is compared.",
            )
        classes = find_port_classes(
            target_module_file,
            inner_class=target_inner_class,
            causal_class=target_causal_class,
            config_class=target_config_class,
        )
        stack = detect_stack(target_module_file, target_stack)
        subject = Subject(source_model_path.absolute(), classes, stack, tp_size)
        options = StageOptions(exp_dir, None, thresholds, force, quiet, debug, seed)
        result = stage0.run(options, subject, load_adapter(stack), output_dir)
        return exit_code(result.verdict)

    run_command(action, debug=debug)


def main() -> None:
    """Entry point of run_stage0.py."""
    typer.run(command)
