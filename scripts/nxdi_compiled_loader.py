"""Prints what a compiled NxD Inference folder was compiled with, rebuilt from its neuron_config.json by public API."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from equiport.errors import EquiportError, ExitCode
from equiport.stacks.loading import load_adapter

_SHOWN = ("tp_degree", "batch_size", "seq_len", "max_context_length", "torch_dtype", "on_device_sampling_config")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code. `--load` puts the model on the device too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled-model-path", required=True, help="the folder that model.compile() wrote")
    parser.add_argument("--model-class", required=True, help="FILE:CLASS of the causal-LM")
    parser.add_argument("--config-class", required=True, help="FILE:CLASS of the InferenceConfig")
    parser.add_argument("--load", action="store_true", help="load the model onto the device as well")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    adapter: Any = load_adapter("nxdi")
    try:
        config = adapter.compiled_config(options.compiled_model_path, options.config_class)
        print(f"{type(config).__name__} with {type(config.neuron_config).__name__}")
        for name in _SHOWN:
            print(f"  {name}: {getattr(config.neuron_config, name, None)}")
        print(f"  model: {options.model_class}")
        if options.load:
            adapter.compiled_model(options.compiled_model_path, options.model_class, config)
            print("loaded")
    except EquiportError as fault:
        if options.debug:
            raise
        print(fault.line(), file=sys.stderr)
        return int(fault.exit_code)
    finally:
        adapter.cleanup()
    return int(ExitCode.PASS)


if __name__ == "__main__":
    sys.exit(main())
