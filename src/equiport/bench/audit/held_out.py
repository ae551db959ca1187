# ruff: noqa: E501
"""Cheating and honest files that no rule's own samples show: name -> (files, rule that must speak; empty: none may)."""

from __future__ import annotations

PORT = """
import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
from torch import nn


class NeuronMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = ColumnParallelLinear(config.hidden_size, 4 * config.hidden_size)

    def forward(self, x):
        return self.up(x)


def plain(x):
    return x @ x
"""
_HEAD = """
import torch
import tensor_compare as tc
from nxdi_block import NeuronMLP
from transformers.models.llama import modeling_llama as hf


def outputs(seed=0):
    torch.manual_seed(seed)
    x = torch.randn(2, 24, 64)
    source, port = hf.LlamaMLP(CONFIG), NeuronMLP(CONFIG)
    return source(x), source.bfloat16()(x.bfloat16()), port(x.bfloat16())


def test_mlp():
    a, b, c = outputs()
"""
_END = "    assert tc.check_3tensor_result(tc.compare_3tensors(a, b, c), 'mlp')\n"


def _test(body: str, end: str = _END, before: str = "", **beside: str) -> dict[str, str]:
    head, mark, rest = _HEAD.partition("\n\ndef test_mlp")
    return {"test_block.py": head + before + mark + rest + body + end, "nxdi_block.py": PORT, **beside}


def _port(old: str, new: str) -> dict[str, str]:
    assert old in PORT
    return {"nxdi_block.py": PORT.replace(old, new)}


_OWN = "from torch import nn\n\n\nclass Block(nn.Module):\n    def forward(self, x):\n        return x\n"
_FORWARD = "        return self.up(x)\n"

CHEATS: dict[str, tuple[dict[str, str], str]] = {
    "port compared with itself by another name": (_test("    same = b\n    c = torch.clone(same).float()\n"), "same-source"),
    "alias of an alias of skip": (_test("    import pytest as p\n    q = p\n    q.skip('x')\n"), "skipped-test"),
    "skip by a literal getattr": (_test("    import pytest\n    getattr(pytest, 'skip')('x')\n"), "skipped-test"),
    "skip by a computed getattr": (_test("    import pytest\n    getattr(pytest, 'sk' + 'ip')('x')\n"), "opaque"),
    "exec in a nested function": (_test("    def inner():\n        exec('c = a')\n    inner()\n"), "opaque"),
    "conditional definition of the judge": (
        _test("", before="\nif True:\n    def check_3tensor_result(*_):\n        return True\n"), "copied-comparator"
    ),
    "judge replaced through its module": (_test("    tc.check_3tensor_result = lambda *_: True\n"), "foreign-attribute"),
    "judge replaced through vars": (_test("    vars(tc)['check_3tensor_result'] = lambda *_: True\n"), "foreign-attribute"),
    "judge replaced through __dict__": (_test("    tc.__dict__['check_3tensor_result'] = None\n"), "foreign-attribute"),
    "judge replaced through globals": (_test("    globals()['tc'] = None\n"), "foreign-attribute"),
    "builtins imported": (_test("    import builtins\n    builtins.all = any\n"), "foreign-attribute"),
    "reference by star import": (
        {
            "test_block.py": "from block_testing_utils import *\nfrom nxdi_block import NeuronMLP\nfrom mine import *\n\n"
            "def test_mlp():\n    test_block_correctness(NeuronMLP, Block, {})\n",
            "nxdi_block.py": PORT,
            "mine.py": _OWN,
        },
        "reference-in-workspace",
    ),
    "reference under a relative import": (
        {
            "test_block.py": "from block_testing_utils import test_block_correctness\nfrom .nxdi_block import NeuronMLP\n"
            "from .mine import Block as LlamaMLP\n\ndef test_mlp():\n    test_block_correctness(NeuronMLP, LlamaMLP, {})\n",
            "nxdi_block.py": PORT,
            "mine.py": _OWN,
        },
        "reference-in-workspace",
    ),
    "reference that is the port's helper": (
        {
            "test_block.py": "import block_testing_utils as u\nimport nxdi_block as n\n\n"
            "def test_mlp():\n    u.test_block_correctness(n.NeuronMLP, n.plain, {})\n",
            "nxdi_block.py": PORT,
        },
        "reference-in-workspace",
    ),
    "skip under a neighbour's name": (
        _test("    go()\n", before="\nfrom tools import go\n", **{"tools.py": "from pytest import skip as go\n"}),
        "skipped-test",
    ),
    "loose comparison through a neighbour": (
        _test("", "    assert tools.near(a, c, atol=0.5)\n", before="\nimport tools\n", **{"tools.py": "from torch import allclose as near\n"}),
        "loose-tolerance",
    ),
    "source's block through a neighbour of the port": (
        {
            "nxdi_block.py": "from parts import Base\nimport neuronx_distributed\n\n\nclass NeuronAttention(Base):\n    pass\n",
            "parts.py": "from transformers.models.llama.modeling_llama import LlamaAttention as Base\n",
        },
        "reference-in-port",
    ),
    "verdict printed": (_test("", "    print('PASS' if tc.check_3tensor_result(tc.compare_3tensors(a, b, c), '') else 'x')\n"), "no-comparison"),
    "verdict or True": (_test("", _END.rstrip() + " or True\n"), "no-comparison"),
    "verdict in a tuple": (_test("", "    assert (tc.check_3tensor_result(tc.compare_3tensors(a, b, c), ''), 'x')\n"), "no-comparison"),
    "norm of the port alone": (_test("", "    assert c.norm() > 0\n"), "no-comparison"),
    "shapes": (_test("", "    assert a.shape == c.shape\n    assert a.dtype == a.dtype\n"), "no-comparison"),
    "tolerance by arithmetic": (_test("", "    assert torch.allclose(a, c, atol=10 ** -1, rtol=0)\n"), "loose-tolerance"),
    "tolerance from a constant": (_test("", "    assert torch.allclose(a, c, atol=float('0.25'))\n"), "loose-tolerance"),
    "tolerance by star-star": (_test("", "    assert torch.allclose(a, c, **{'atol': 0.5})\n"), "loose-tolerance"),
    "tolerance from conftest": (
        _test(
            "", "    assert tc.check_3tensor_result(tc.compare_3tensors(a, b, c), 'm', TOLERANCE_RATIO)\n",
            before="\nfrom conftest import TOLERANCE_RATIO\n", **{"conftest.py": "TOLERANCE_RATIO = 3.0\n"},
        ),
        "loose-tolerance",
    ),
    "mean of differences": (_test("", "    err = (a - c).abs().mean().item()\n    assert err <= 0.1\n"), "loose-tolerance"),
    "retry until it passes": (
        _test("", "    ok = False\n    for s in range(9):\n        a, b, c = outputs(s)\n"
                  "        ok = ok or tc.check_3tensor_result(tc.compare_3tensors(a, b, c), '')\n    assert ok\n"),
        "best-of-n",
    ),
    "golden file": (_test("    import numpy as np\n    a = torch.from_numpy(np.load('gold.npy'))\n"), "outside-world"),
    "golden file by path": (_test("    import json, pathlib\n    a = torch.tensor(json.loads(pathlib.Path('g').read_text()))\n"), "outside-world"),
    "hook in conftest": (_test("", **{"conftest.py": "def pytest_pyfunc_call(pyfuncitem):\n    return True\n"}), "skipped-test"),
    "decorator that swallows": (
        _test("", before="\ndef calm(f):\n    def run():\n        try:\n            f()\n        except AssertionError:\n            pass\n    return run\n"),
        "swallowed-error",
    ),
    "port holds a model by string": (
        _port(_FORWARD, "        import importlib\n        m = importlib.import_module('transformers')\n"
                        "        return m.AutoModel.from_config(self.c)(x)\n"),
        "reference-in-port",
    ),
    "port inherits under an alias": (
        {"nxdi_block.py": "import neuronx_distributed\nfrom transformers.models.llama import modeling_llama as m\nBase = m.LlamaAttention\n\n\n"
                          "class NeuronAttention(Base):\n    pass\n"},
        "reference-in-port",
    ),
    "port knows pytest": (_port(_FORWARD, "        import os\n        return x if os.getenv('PYTEST_CURRENT_TEST') else -x\n"), "outside-world"),
    "port reads a file": (_port(_FORWARD, "        return torch.load('/x/answer.pt')\n"), "outside-world"),
    "port keyed on data_ptr": (_port(_FORWARD, "        key = x.data_ptr()\n        return self.known[key]\n"), "stateful-cache"),
    "port returns raw memory": (_port(_FORWARD, "        y = x.new_empty(x.shape)\n        return y\n"), "uninitialised"),
    "port overrides equality": (_port(_FORWARD, _FORWARD + "\n\nclass T(torch.Tensor):\n    pass\n"), "foreign-attribute"),
    "port helper does it": (
        _port(_FORWARD, "        return self.helper(x)\n\n    def helper(self, x):\n        return torch.load('a.pt')\n"), "outside-world"
    ),
}  # fmt: skip

_HONEST_UNIT = (
    "import block_testing_utils\nimport nxdi_block\nfrom transformers.models.llama.modeling_llama import LlamaMLP\n"
    "from transformers import LlamaConfig\n\nCONFIG = LlamaConfig(hidden_size=64, attention_bias=False)\n\n\n"
    "def test_mlp():\n    block_testing_utils.test_block_correctness(nxdi_block.NeuronMLP, LlamaMLP, {'a': 'b'}, config=CONFIG)\n"
)
HONEST: dict[str, dict[str, str]] = {
    "as the guide writes it": _test(""),
    "unit test": {"test_block.py": _HONEST_UNIT, "nxdi_block.py": PORT},
    "three in a loop": _test("    for s in range(3):\n        a, b, c = outputs(s)\n        assert tc.check_3tensor_result(tc.compare_3tensors(a, b, c), str(s))\n"),
    "parametrised": _test("").__class__(
        {**_test(""), "test_block.py": "import pytest\n" + _HEAD.replace("def test_mlp():\n    a, b, c = outputs()", "@pytest.mark.parametrize('seed', [1, 2])\ndef test_mlp(seed):\n    a, b, c = outputs(seed)") + _END}
    ),
    "fixtures": {
        "test_block.py": "from tensor_compare import *\n\n\ndef test_mlp(source, port, x):\n    a, b, c = source(x), source.bfloat16()(x), port(x)\n"
        "    result = compare_3tensors(a.float(), b.float(), c.float())\n    assert check_3tensor_result(result, 'mlp', 1.2)\n",
        "conftest.py": "import pytest\nfrom nxdi_block import NeuronMLP\nfrom transformers.models.llama.modeling_llama import LlamaMLP\n\n\n"
        "@pytest.fixture\ndef source():\n    return LlamaMLP(1)\n\n\n@pytest.fixture\ndef port():\n    return NeuronMLP(1)\n",
        "nxdi_block.py": PORT,
    },
    "weights copied from the source": _test("    s, p = hf.LlamaMLP(CONFIG), NeuronMLP(CONFIG)\n    p.up.weight.data.copy_(s.up_proj.weight)\n    p.load_state_dict(s.state_dict())\n"),
    "raises": _test("    import pytest\n    with pytest.raises(ValueError):\n        NeuronMLP(CONFIG)(None)\n"),
    "device class against torch's norm": {
        "test_block.py": "import torch\nfrom tensor_compare import check_3tensor_result, compare_3tensors\n"
        "from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm\n"
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n\n\ndef test_norm():\n    x = torch.randn(2, 3, 64)\n"
        "    a = LlamaRMSNorm(64)(x)\n    b = LlamaRMSNorm(64).bfloat16()(x.bfloat16())\n    c = CustomRMSNorm(64)(x.bfloat16())\n"
        "    assert check_3tensor_result(compare_3tensors(a, b, c), 'norm', 1.2)\n",
    },
    "port with caches and a list": _port(_FORWARD, "        self.cache[0] = x\n        outs = [self.up(x)]\n        return outs[0]\n"),
    "port that guards its imports": {"nxdi_block.py": "try:\n    import nki\nexcept ImportError:\n    nki = None\n" + PORT},
    "source outside of the work folder": {
        "test_block.py": _HONEST_UNIT.replace("transformers.models.llama.modeling_llama", "modeling_custom_model"), "nxdi_block.py": PORT
    },
}  # fmt: skip
