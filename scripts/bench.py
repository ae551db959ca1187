#!/usr/bin/env python3
"""Costs as ratios, measured side by side in one run: the comparator against a plain formula, the port against HF.

Usage: python scripts/bench.py [--model HF_DIR]   (`make bench`)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from equiport.compare import compare_3tensors
from equiport.content import content_dir
from equiport.reference.logits import sequence_logits
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages.port_run import make_port

_TOKENS = 48


def seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """Best of `repeats` after one warm-up."""
    action()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best


def bench_compare() -> None:
    """compare_3tensors (all metrics, slices, BC) against numpy's R in one expression, 4 million elements."""
    torch.manual_seed(0)
    ref = torch.randn(2000, 2000)
    bf16, target = ref.to(torch.bfloat16), (ref + 1e-3 * torch.randn_like(ref)).to(torch.bfloat16)

    def plain() -> float:
        r, b, t = (tensor.double().numpy() for tensor in (ref, bf16, target))
        return float(np.linalg.norm(t - r) / np.linalg.norm(b - r))

    def ours() -> float:
        return compare_3tensors(ref, bf16, target, name="bench").r_ratio

    assert abs(plain() - ours()) < 1e-8 * plain()  # R has an epsilon of 1e-12 of the reference
    ratio = seconds(ours) / seconds(plain)
    print(f"compare, 4M elements, all metrics: {ratio:.2f} x the time of R alone in numpy")


def bench_port(model: Path) -> None:
    """One prefill of the example port on this machine's tier against HF's forward, fp32 and bf16."""
    port = content_dir("examples") / "llama" / "modeling_llama_nxdi.py"
    adapter = load_adapter("nxdi")
    print(f"port: {adapter.check_environment().headline}")
    ids = torch.randint(1, 1000, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = _reference_seconds(model, dtype, ids), _port_seconds(adapter, port, model, dtype, ids)
        print(f"prefill of {_TOKENS} tokens, {str(dtype)[6:]}: port {ours / theirs:.2f} x HF ({theirs:.3f} s)")


def _reference_seconds(model: Path, dtype: torch.dtype, ids: torch.Tensor) -> float:
    reference = load_reference(model, dtype)
    return seconds(lambda: sequence_logits(reference, ids[0].tolist(), _TOKENS - 1))


def _port_seconds(adapter: StackAdapter, port: Path, model: Path, dtype: torch.dtype, ids: torch.Tensor) -> float:
    target, _ = make_port(adapter, find_port_classes(port), model, dtype, batch_size=1, seq_len=_TOKENS)
    lengths = torch.tensor([_TOKENS])
    return seconds(lambda: adapter.forward(target, ids, lengths=lengths))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo/model"))
    options = parser.parse_args()
    bench_compare()
    bench_port(options.model)


if __name__ == "__main__":
    main()
