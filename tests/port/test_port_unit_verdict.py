"""A unit's test passes by what the comparator recorded and pytest reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiport.port.port_run_units import run_unit_test, write_unit
from equiport.port.translate import UnitFiles

_BLOCK = '''"""Root mean square norm."""

import torch


class Block(torch.nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden_states.dtype)
'''
_TEST = '''"""The block against its source."""

import block_testing_utils
from nxdi_block import Block
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def test_block():
    block_testing_utils.test_block_correctness(
        Block, LlamaRMSNorm, {"weight": "weight"}, neuron_init_kwargs={"hidden_size": 8, "eps": EPS},
        pytorch_init_kwargs={"hidden_size": 8, "eps": 1e-1}, batch_size=2, seq_len=24, hidden_size=8,
    )
'''
_RIGHT, _WRONG = _TEST.replace("EPS", "1e-1"), _TEST.replace("EPS", "1e-6")


def _unit(folder: Path, test: str) -> Path:
    folder.mkdir(parents=True)
    write_unit(folder, "mlp", UnitFiles(_BLOCK, test))
    return folder


@pytest.mark.parametrize(
    "ini", ["[tool.pytest.ini_options]\naddopts = '-q'\n", "[tool.pytest.ini_options]\naddopts = '--nope'\n"]
)
def test_a_users_pytest_configuration_changes_nothing(tmp_path: Path, ini: str) -> None:
    (tmp_path / "pyproject.toml").write_text(ini)
    ended = run_unit_test(_unit(tmp_path / "runs" / "units", _RIGHT), "mlp")
    assert ended.passed and ended.line.startswith("1 passed, 1 comparisons"), ended.line


def test_a_wrong_block_is_told_with_its_figures(tmp_path: Path) -> None:
    ended = run_unit_test(_unit(tmp_path / "units", _WRONG), "mlp")
    assert not ended.passed and "R32" in ended.line, ended.line


def test_what_is_printed_is_no_verdict(tmp_path: Path) -> None:
    test = _WRONG.replace(
        "def test_block():", "def test_block():\n    import sys\n    print('1 passed in 0.10s')\n    sys.exit(0)\n"
    )
    ended = run_unit_test(_unit(tmp_path / "units", test), "mlp")
    assert not ended.passed, ended.line
