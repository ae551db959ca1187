"""Split baselines: a correct sharded reduction is measured against one that is split alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equiport.compare import (
    Thresholds,
    Verdict,
    compare_3tensors,
    judge,
    split_label,
    split_linear,
    split_matmul,
    split_reduction,
)
from equiport.errors import EquiportError


def deep_linear() -> tuple[torch.Tensor, nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    fp32 = nn.Linear(4096, 96, bias=False)
    with torch.no_grad():
        fp32.weight.copy_(fp32.weight.bfloat16().float())
    bf16 = nn.Linear(4096, 96, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        bf16.weight.copy_(fp32.weight)
    return torch.randn(64, 4096).bfloat16(), fp32, bf16


@pytest.mark.parametrize("degree", [4, 8])
def test_a_correct_split_of_a_deep_matmul(degree: int) -> None:
    inputs, fp32, bf16 = deep_linear()
    with torch.no_grad():
        # the target: shards of the weight, partial sums in bf16, added as an all-reduce adds them
        width = 4096 // degree
        parts = [
            inputs[:, rank * width : (rank + 1) * width] @ bf16.weight[:, rank * width : (rank + 1) * width].T
            for rank in range(degree)
        ]
        target = parts[0].clone()
        for part in parts[1:]:
            target += part
        ref = fp32(inputs.float())
        plain = compare_3tensors(ref, bf16(inputs), target)
        with split_reduction(bf16, degree) as names:
            split_bf16 = bf16(inputs)
        split = compare_3tensors(ref, split_bf16, target, baseline=split_label(degree))
    assert names == ("",)
    assert plain.r_ratio > 1.2 and judge(plain, Thresholds()).verdict is Verdict.FAIL
    assert split.baseline == f"split:{degree}"
    assert 0.8 < split.r_ratio < 1.2 and judge(split, Thresholds()).verdict is Verdict.PASS
    wrong = target - parts[1]  # one rank's part lost
    bad = compare_3tensors(ref, split_bf16, wrong, baseline=split_label(degree))
    assert judge(bad, Thresholds()).verdict is Verdict.FAIL


def test_partial_sums_are_rounded_to_the_tensors_dtype() -> None:
    inputs = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    assert float(split_linear(inputs, weight, None, 2)) == 256.0  # 257 is no bf16 number
    bias = torch.tensor([2.0], dtype=torch.bfloat16)
    assert float(split_linear(inputs, weight, bias, 2)) == 258.0
    left, right = torch.randn(3, 8), torch.randn(8, 5)
    assert torch.allclose(split_matmul(left, right, 4), left @ right, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"o_proj": nn.Linear(8, 8), "q_proj": nn.Linear(8, 8)}) for _ in (0, 1)
        )
        self.odd = nn.Linear(6, 8)


def test_named_linears_are_split_and_restored() -> None:
    block = Block()
    with split_reduction(block, 4, ["o_proj"]) as names:
        assert names == ("layers.0.o_proj", "layers.1.o_proj")
        assert "forward" in vars(block.layers[0]["o_proj"]) and "forward" not in vars(block.layers[0]["q_proj"])
    with pytest.raises(RuntimeError, match="inside"), split_reduction(block, 2, ["layers.1.o_proj"]) as names:
        assert names == ("layers.1.o_proj",)
        raise RuntimeError("inside")
    assert all("forward" not in vars(child) for child in block.modules())


@pytest.mark.parametrize(("degree", "names"), [(4, None), (4, ["odd"]), (2, ["gate"]), (0, None), (2, [])])
def test_what_cannot_be_split_is_refused(degree: int, names: list[str] | None) -> None:
    with pytest.raises(EquiportError), split_reduction(Block(), degree, names):
        pytest.fail("not refused")


def test_a_conv1d_is_a_linear_with_its_weight_turned() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(3)
    turned = Conv1D(6, 8)
    with torch.no_grad():
        turned.bias.normal_()
    turned = turned.to(torch.bfloat16)
    inputs = torch.randn(5, 8).to(torch.bfloat16)
    with split_reduction(turned, 1):
        apart = turned(inputs)
    assert torch.equal(apart, (inputs @ turned.weight) + turned.bias)
    with split_reduction(turned, 2):
        halves = turned(inputs)
    expected = (inputs[:, :4] @ turned.weight[:4]) + (inputs[:, 4:] @ turned.weight[4:]) + turned.bias
    assert torch.equal(halves, expected)
    with pytest.raises(EquiportError), split_reduction(turned, 3):
        pass
