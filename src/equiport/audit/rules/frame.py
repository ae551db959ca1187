"""The frame of rules' samples: a component test around some statements, and a port beside it."""

from __future__ import annotations

from equiport.audit.model import Sample

PORT = """
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn


class NeuronMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(self.up_proj(x))
"""

_HEAD = """
import pytest
import torch
from block_testing_utils import test_block_correctness
from modeling_x_nxdi import NeuronMLP
from tensor_compare import check_3tensor_result, compare_3tensors
from transformers.models.llama.modeling_llama import LlamaMLP

TOLERANCE_RATIO = 1.2
"""

_RUN = """    torch.manual_seed(42)
    ref_fp32, ref_bf16, target = LlamaMLP(CONFIG), LlamaMLP(CONFIG).bfloat16(), NeuronMLP(CONFIG)
    x = torch.randn(2, 24, 64)
    with torch.no_grad():
        out1 = ref_fp32(x.float()).float()
        out2 = ref_bf16(x.to(torch.bfloat16)).float()
        raw = target(x.to(torch.bfloat16))
        out3 = raw[0].float() if isinstance(raw, tuple) else raw.float()
"""

_JUDGE = """    result = compare_3tensors(out1, out2, out3)
    assert check_3tensor_result(result, "mlp", TOLERANCE_RATIO)
"""


def in_test(statements: str = "", *, judge: str = _JUDGE, head: str = "", run: str = _RUN, file: str = "") -> Sample:
    """A component test as the Equivalence guide writes it, with `statements` between the runs and the judgement."""
    code = f"{_HEAD}{head}\n\ndef test_mlp():\n{run}{statements}{judge}"
    return Sample(code, file or "test_00_mlp.py", {"modeling_x_nxdi.py": PORT})


def in_forward(statements: str, *, head: str = "", body: str = "") -> Sample:
    """A port whose forward holds `statements`; `body` adds to its class."""
    code = (
        "import torch\nfrom neuronx_distributed.parallel_layers.layers import ColumnParallelLinear\n"
        f"from torch import nn\n"
        f"{head}\n\nclass NeuronMLP(nn.Module):\n{body}\n    def forward(self, x):\n{statements}"
    )
    return Sample(code, "modeling_x_nxdi.py")
