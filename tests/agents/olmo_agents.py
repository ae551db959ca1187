"""What scripted agents write for a tiny OLMo: its clamped attention and its norm without weights are in no recipe.

Some of it is wrong on purpose: a test whose reference is its own block, a norm with a wrong epsilon.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize

CONFIG: dict[str, Any] = {
    "model_type": "olmo", "architectures": ["OlmoForCausalLM"], "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu",
    "rope_theta": 10000.0, "clip_qkv": 2.0, "tie_word_embeddings": False, "attention_bias": False,
    # nothing reads it: the question that is open
    "mlp_bias": True,
}  # fmt: skip

ATTENTION = '''"""OLMo: attention whose projections are clamped."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from port_config import OlmoInferenceConfig
from torch import Tensor


class WideTables(RotaryEmbedding):
    """Tables in float32, as the source's."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x.new_zeros(1, dtype=torch.float32), position_ids)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [batch, heads, sequence, head_dim] by halves."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


class NeuronOlmoAttention(NeuronAttentionBase):
    """Grouped-query attention; the base class clamps."""

    def __init__(self, config: OlmoInferenceConfig) -> None:
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=WideTables(config.head_dim, config.max_position_embeddings, base=config.rope_theta),
            num_cores_per_group=config.num_cores_per_group,
            clip_qkv=config.clip_qkv,
        )

    def apply_rotary_embedding(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        position_ids: Tensor,
        cos_cache: Tensor | None,
        sin_cache: Tensor | None,
        use_polar_compatible_rope: bool,
    ) -> tuple[Any, ...]:
        """Rotate Q and K."""
        if cos_cache is None or sin_cache is None:
            counted = torch.arange(Q.shape[2], device=Q.device).expand(Q.shape[0], -1)
            cos_cache, sin_cache = self.rotary_emb(V, counted)
        return rotate(Q, cos_cache, sin_cache), rotate(K, cos_cache, sin_cache), cos_cache, sin_cache
'''

_TEST_HEAD = '''"""Unit test of the translated block."""

import block_testing_utils
from equiport.port.translate_world import UnitWorld
{imports}
WORLD = UnitWorld("nxdi", {config})

import nxdi_block  # noqa: E402
import port_config  # noqa: E402

CONFIG = WORLD.port_config(port_config.OlmoInferenceConfig)
'''
_ATTENTION_TEST = """

def test_attention():
    block_testing_utils.test_block_correctness(
        nxdi_block.NeuronOlmoAttention,
        {reference},
        {{
            "qkv_proj.q_proj.weight": "q_proj.weight",
            "qkv_proj.k_proj.weight": "k_proj.weight",
            "qkv_proj.v_proj.weight": "v_proj.weight",
            "o_proj.o_proj.weight": "o_proj.weight",
        }},
        neuron_init_kwargs={{"config": CONFIG}},
        pytorch_init_kwargs={{"config": WORLD.hf_config, "layer_idx": 0}},
        test_inputs=[WORLD.attention_inputs()],
        reference_inputs=[WORLD.reference_attention_inputs(OlmoRotaryEmbedding(WORLD.hf_config), 0)],
    )
"""
_CHEAT = '''

class Reference(torch.nn.Module):
    """The attention, as I understand it."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.inner = nxdi_block.NeuronOlmoAttention(CONFIG)

    def forward(self, hidden_states, attention_mask, position_embeddings):
        return self.inner(hidden_states)
'''

NORM = '''"""OLMo: token embeddings, and a norm without weights."""

from __future__ import annotations

from neuronx_distributed.parallel_layers.layers import ParallelEmbedding
from neuronx_distributed_inference.utils.distributed import get_tp_group
from port_config import OlmoInferenceConfig
from torch import Tensor, nn


class OlmoNorm(nn.Module):
    """LayerNorm without weights, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        return nn.functional.layer_norm(x.float(), (self.width,), eps=EPSILON).to(x.dtype)


def make_token_embedding(config: OlmoInferenceConfig, sequence_dimension: int | None) -> ParallelEmbedding:
    """Token embeddings, each rank with its part of the hidden dimension."""
    # DEVIATION: the table is sharded over the hidden dimension; no numerical difference is expected.
    return ParallelEmbedding(
        config.vocab_size,
        config.hidden_size,
        config.pad_token_id,
        dtype=config.neuron_config.torch_dtype,
        shard_across_embedding=True,
        sequence_parallel_enabled=config.neuron_config.sequence_parallel_enabled,
        sequence_dimension=sequence_dimension,
        pad=True,
        tensor_model_parallel_group=get_tp_group(config),
    )
'''
_NORM_TEST = """

def test_norm():
    block_testing_utils.test_block_correctness(
        lambda: nxdi_block.OlmoNorm(48, eps=1e-5),
        lambda: OlmoLayerNorm(48),
        {},
        test_inputs=[WORLD.hidden(48)],
    )


def test_embedding():
    block_testing_utils.test_block_correctness(
        nxdi_block.make_token_embedding,
        lambda: WORLD.source_module("model.embed_tokens"),
        {"weight": "weight"},
        neuron_init_kwargs={"config": CONFIG, "sequence_dimension": 1},
        test_inputs=[WORLD.tokens()],
    )
"""
_SOURCE = "from transformers.models.olmo.modeling_olmo import {names}"


def tiny() -> dict[str, Any]:
    """The config that units are tested with."""
    return {name: value for name, value in CONFIG.items() if name not in ("architectures", "mlp_bias")}


def attention_test(*, cheats: bool = False) -> str:
    """The test of the attention; a cheating one compares the block with itself."""
    names = "OlmoRotaryEmbedding" if cheats else "OlmoAttention, OlmoRotaryEmbedding"
    imports = ("import torch\n" if cheats else "") + _SOURCE.format(names=names) + "\n"
    head = _TEST_HEAD.format(imports=imports, config=tiny())
    return (
        head + (_CHEAT if cheats else "") + _ATTENTION_TEST.format(reference="Reference" if cheats else "OlmoAttention")
    )


def norm_block(*, right: bool) -> str:
    """The block of norm and embeddings."""
    return NORM.replace("EPSILON", "self.eps" if right else "0.5")


def norm_test() -> str:
    """The test of norm and embeddings."""
    return _TEST_HEAD.format(imports=_SOURCE.format(names="OlmoLayerNorm") + "\n", config=tiny()) + _NORM_TEST


def make_olmo(root: Path) -> Path:
    """The HF folder of the tiny model, with perturbed weights."""
    (root / "source").mkdir(parents=True)
    (root / "source" / "config.json").write_text(json.dumps(CONFIG))
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 3, tiny=False).folder
