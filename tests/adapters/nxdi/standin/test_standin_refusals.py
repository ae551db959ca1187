"""What the stand-in does not have it refuses by name; it never answers with a mock."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

ATTEMPTS = {
    "a module": "import neuronx_distributed.pipeline.model",
    "a module of inference": "from neuronx_distributed_inference.modules.eagle.token_tree import TokenTree",
    "a deep module": "import neuronx_distributed_inference.models.mllama.modeling_mllama",
    "a name": "from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig",
    "an override": "Mine()",
    "experts of ranks": "MoEConfig(moe_ep_degree=2)",
    "the block of one token by a kernel": "MoEConfig(moe_fused_nki_kernel_enabled=True)",
    "a name of a package": "from neuronx_distributed import ModelBuilder",
    "an attribute": "import neuronx_distributed as nxd; nxd.parallel_layers.layers.OutputChannelParallelConv2d",
    "hasattr": "import neuronx_distributed.parallel_layers.layers as m; hasattr(m, 'OutputChannelParallelConv2d')",
    "caught": """
try:
    from neuronx_distributed_inference.modules.eagle.token_tree import TokenTree
except ImportError:
    raise KeyError(missing_so_far())
""",
    "a flag": "Config(qkv_kernel_enabled=True)",
    "quantization": "Config(quantized=True, quantized_checkpoints_path='x')",
    "speculation": "Config(speculation_length=4)",
    "a parallelism": "Config(cp_degree=2, tp_degree=4)",
    "a cache layout": "Config(is_block_kv_layout=True)",
    "lora": "Config(lora_config={'max_lora_rank': 4})",
    "sampling": "Sampler(Config(on_device_sampling_config={'do_sample': True}))",
    "a call": "from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM as C; C.compile('x')",
    "a group": "groups.get_context_parallel_attention_cp_group()",
    "a kernel": "kernel()",
    "dunder": "import neuronx_distributed.trace as m; m.__wrapped__",
    "a folder of the package": "import neuronx_distributed as nxd; raise KeyError(nxd.parallel_layers.layers.__name__)",
    "flags that are off": "Config(qkv_kernel_enabled=None, speculation_length=0); raise KeyError('ok')",
    "find_spec of others": "import importlib.util as u; raise KeyError(str(u.find_spec('torch_xla_of_nobody')))",
}

SCRIPT = """
import json, sys
sys.path[:0] = {paths!r}
from neuronx_distributed._standin.missing import StandInMissing, missing_so_far
from neuronx_distributed_inference.models.config import NeuronConfig as Config
from neuronx_distributed_inference.modules.attention import attention_process_groups as groups
from neuronx_distributed_inference.modules.attention._scores import AttentionScores
from neuronx_distributed_inference.modules.generation.sampling import Sampler
from neuronx_distributed_inference.models.config import MoENeuronConfig as MoEConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseModel

class Mine(NeuronBaseModel):
    def __init__(self):
        super().__init__(None)

    def _sample_on_device(self):
        return None

def kernel():
    block = AttentionScores()
    block.attn_kernel_enabled, block.logical_nc_config = None, 1
    block.perform_prefill(None, None, None, 4096, 1, None)

found = {{}}
for name, code in {attempts!r}.items():
    try:
        exec(code, {{**globals()}})
        found[name] = ["no error", "", []]
    except BaseException as error:
        kinds = [kind.__name__ for kind in (StandInMissing, ImportError, ValueError) if isinstance(error, kind)]
        found[name] = [type(error).__name__, str(error), kinds]
print(json.dumps(found))
"""


@cache
def _found() -> dict[str, list]:
    paths = [str(ROOT / "src"), str(ROOT / "adapters" / "nxdi" / "standin")]
    script = SCRIPT.format(paths=paths, attempts=ATTEMPTS)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("a module", "neuronx_distributed.pipeline"),
        ("a module of inference", "neuronx_distributed_inference.modules.eagle"),
        ("a deep module", "neuronx_distributed_inference.models.mllama"),
        ("a name", "neuronx_distributed_inference.models.config.FusedSpecNeuronConfig"),
        ("a name of a package", "neuronx_distributed.ModelBuilder"),
        ("an attribute", "neuronx_distributed.parallel_layers.layers.OutputChannelParallelConv2d"),
        ("hasattr", "neuronx_distributed.parallel_layers.layers.OutputChannelParallelConv2d"),
    ],
)
def test_a_missing_name_is_named_with_two_ways_on(name: str, symbol: str) -> None:
    kind, text, kinds = _found()[name]
    assert kind == "StandInMissing"
    assert "ImportError" in kinds
    assert text.startswith(symbol + ":")
    assert "EQUIPORT_NXDI_SRC" in text and "EQUIPORT_NXD_SRC" in text and "install" in text


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("a flag", "qkv_kernel_enabled=True"),
        ("quantization", "quantized=True"),
        ("speculation", "speculation_length=4"),
        ("a parallelism", "cp_degree=2"),
        ("a cache layout", "is_block_kv_layout=True"),
        ("lora", "lora_config="),
        ("sampling", "do_sample=True"),
        ("an override", "Mine._sample_on_device"),
        ("experts of ranks", "moe_ep_degree"),
        ("the block of one token by a kernel", "moe_fused_nki_kernel_enabled=True"),
        ("a call", "NeuronApplicationBase.compile"),
        ("a group", "get_context_parallel_attention_cp_group"),
        ("a kernel", "4096 positions"),
    ],
)
def test_what_is_not_served_is_refused_by_name(name: str, flag: str) -> None:
    kind, text, kinds = _found()[name]
    assert kind == "StandInRefused"
    assert "StandInMissing" in kinds and "ValueError" in kinds
    assert flag in text and "EQUIPORT_NXDI_SRC" in text


def test_an_import_that_a_port_catches_is_remembered() -> None:
    kind, text, _ = _found()["caught"]
    assert kind == "KeyError"
    assert "neuronx_distributed_inference.modules.eagle" in text


def test_pythons_own_probing_still_works() -> None:
    assert _found()["dunder"][0] == "AttributeError"
    assert _found()["find_spec of others"][1] == "'None'"


def test_subpackages_are_reached_by_attribute() -> None:
    assert _found()["a folder of the package"][1] == "'neuronx_distributed.parallel_layers.layers'"


def test_flags_that_are_off_are_accepted() -> None:
    assert _found()["flags that are off"][1] == "'ok'"
