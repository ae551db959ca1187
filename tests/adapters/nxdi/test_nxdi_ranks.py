"""Two gloo ranks in float32 give what HuggingFace gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT, PROMPTS, reference, relative

RANK = """
import sys, torch
torch.set_num_threads(1)
from equiport.errors import EquiportError
from equiport.stacks.loading import load_adapter
from equiport.stacks.teacher_forcing import decode_logits
port, causal, config, folder, out = sys.argv[1:]
adapter = load_adapter("nxdi")
try:
    adapter.create_model(port, causal, config, folder, dtype=torch.bfloat16, tp_degree=2)
except EquiportError as fault:
    assert "gloo cannot reduce it" in str(fault)
else:
    raise AssertionError("bfloat16 on two ranks was taken")
tokens, prompts = torch.load(out + ".in")
for _ in range(2):
    sizes = {"batch_size": 3, "seq_len": 32, "tp_degree": 2}
    model = adapter.create_model(port, causal, config, folder, dtype=torch.float32, **sizes)
    report = adapter.load_weights(model, folder, torch.float32)
    assert report.clean, report
    logits = decode_logits(adapter, model, tokens, prompts)
if torch.distributed.get_rank() == 0:
    torch.save(logits, out)
adapter.cleanup()
"""


@pytest.mark.slow
def test_two_ranks(make_folder: Callable[..., Path], tokens: list[list[int]], tmp_path: Path) -> None:
    folder = make_folder(attention_bias=True)
    script, out = tmp_path / "rank.py", tmp_path / "logits.pt"
    script.write_text(RANK)
    torch.save((tokens, PROMPTS), f"{out}.in")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command = [*launch, str(PORT), CAUSAL, CONFIG, str(folder), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert relative(torch.load(out), reference(folder, tokens)) < 5e-6
