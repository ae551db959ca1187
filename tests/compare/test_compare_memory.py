"""Extra memory is bounded by a constant: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, sys
import torch
from equiport.compare import compare_3tensors, compare_logits
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
ref = torch.randn(1000, int(sys.argv[1]), generator=generator)
tensors = ref, ref.bfloat16(), ref.bfloat16()
fp32 = ref.clone()
small = ref[:2, :2].clone()
for call in (compare_3tensors, compare_logits):
    call(small, small.bfloat16(), small.bfloat16(), target_fp32=small.clone())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
compare_3tensors(*tensors, target_fp32=fp32)
compare_3tensors(*(tensor.T for tensor in tensors), target_fp32=fp32.T)
compare_logits(*tensors, target_fp32=fp32)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("columns", [4_000, 8_000])
def test_peak_memory_does_not_grow_with_the_tensor(columns: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROBE, str(columns)], capture_output=True, text=True, check=True, timeout=120
    )
    # A float64 copy of one tensor is 32 and 64 MB.
    assert int(run.stdout) < 40, f"{columns} columns: {run.stdout} MB more"


def test_a_long_axis_is_summed_in_groups() -> None:
    from equiport.compare.slices import SliceSums

    table = SliceSums((2, 1_000_003), ("err",), max_slices=1000).axes[1]
    assert len(table.sums["err"]) <= 1000
    assert float(table.counts.sum()) == 2 * 1_000_003
