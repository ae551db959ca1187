"""Runs the contract cases on one tier and writes the answers (`--tier standin|real --out file`).

Cases that need a process of their own run in a fork that has imported the stack and started nothing.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import socket
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from registry import Case, cases, load_cases
from tiers import put_on_path


def _in_short() -> str:
    """The error, and the last lines of the code that led to it, in one line."""
    kind, error, trace = sys.exc_info()
    steps = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(trace)[-5:]]
    return f"{kind.__name__ if kind else ''}: {error} ({' > '.join(steps)})"


def _answer(item: Case) -> tuple[dict[str, Any], str]:
    torch.manual_seed(0)
    os.environ["NXD_CPU_MODE"] = "1"
    try:
        with torch.no_grad():
            return item.run(), ""
    except Exception:
        return {}, _in_short()


def _in_a_fork(item: Case, out: str) -> tuple[dict[str, Any], str]:
    path = f"{out}.one"
    child = os.fork()
    if child == 0:
        torch.save(_answer(item), path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        return {}, f"the process of {item.name} ended with status {status}"
    return torch.load(path, weights_only=False)


def main() -> None:
    """Run and write {case: (values, failure)}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", choices=("standin", "real"), required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    tempfile.tempdir = str(Path(options.out).resolve().parent)  # the caller's own, which it removes
    put_on_path(options.tier)
    importlib.import_module("neuronx_distributed_inference.models.llama.modeling_llama")
    load_cases()
    found = {item.name: _in_a_fork(item, options.out) for item in cases() if item.fresh}
    found.update({item.name: _answer(item) for item in cases() if not item.fresh})
    torch.save(found, options.out)


if __name__ == "__main__":
    main()
