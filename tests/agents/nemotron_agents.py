"""What scripted agents write for a tiny Nemotron: its norm counts from one, which is in no recipe; a test hides the
recipe of its attention.

Attention: attempt 1 cheats (its reference is its own), attempt 2 passes its tests and counts positions from zero in
decode, which stage 2 finds and the patch mends. Norm and embeddings: attempt 1 forgets the one, attempt 2 is right.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize

from . import olmo_agents

CONFIG: dict[str, Any] = {
    "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "relu2",
    "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
    # nothing reads it: the question that is open
    "use_qk_norm": True,
}  # fmt: skip

ATTENTION = '''"""Nemotron: attention of which half of each head turns."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from port_config import NemotronInferenceConfig
from torch import Tensor


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of x [batch, heads, sequence, head_dim] by halves; the others pass."""
    width = cos.shape[-1]
    turning, passing = x[..., :width], x[..., width:]
    turned = torch.cat((-turning[..., width // 2 :], turning[..., : width // 2]), dim=-1)
    return torch.cat((turning * cos[:, None] + turned * sin[:, None], passing), dim=-1)


class NeuronNemotronAttention(NeuronAttentionBase):
    """Grouped-query attention."""

    def __init__(self, config: NemotronInferenceConfig) -> None:
        width = int(config.head_dim * config.partial_rotary_factor)
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=RotaryEmbedding(width, config.max_position_embeddings, base=config.rope_theta),
            num_cores_per_group=config.num_cores_per_group,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
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
        return rotate_part(Q, cos_cache, sin_cache), rotate_part(K, cos_cache, sin_cache), cos_cache, sin_cache
'''
_NORM = '''class NemotronNorm(nn.Module):
    """LayerNorm whose weight counts from one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same shape and dtype."""
        return nn.functional.layer_norm(x, (self.width,), FACTOR, self.bias, self.eps)


'''
_NORM_TEST = """

def test_norm():
    block_testing_utils.test_block_correctness(
        lambda: nxdi_block.NemotronNorm(48, eps=1e-5),
        lambda: NemotronLayerNorm1P(48, eps=1e-5),
        {"weight": "weight", "bias": "bias"},
        test_inputs=[WORLD.hidden(48)],
    )
"""
PATCH = '''"""self_attn fails in decode: positions are counted from zero in each call.

The source rotates by the positions it is given (NemotronRotaryEmbedding.forward); the port must use position_ids.
"""


def apply_self_attn_patch():
    """Call it before the model is made; a second call changes nothing."""
    import modeling_nemotron_nxdi as port

    attention = port.NeuronNemotronAttention
    if getattr(attention, "_patched_self_attn", False):
        return

    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids)
        turned = [port.rotate_part(x, cos_cache, sin_cache) for x in (Q, K)]
        return turned[0], turned[1], cos_cache, sin_cache

    attention.apply_rotary_embedding = apply_rotary_embedding
    attention._patched_self_attn = True
'''


def attention_test(*, cheats: bool) -> str:
    """The test of the attention; a cheating one compares the block with itself."""
    return _named(olmo_agents.attention_test(cheats=cheats))


def norm_block(*, right: bool) -> str:
    """The block of norm and embeddings."""
    block = olmo_agents.NORM
    start, end = block.index("class OlmoNorm"), block.index("def make_token_embedding")
    own = _NORM.replace("FACTOR", "self.weight + 1.0" if right else "self.weight")
    text = block[:start] + own + block[end:]
    return (
        text.replace("Olmo", "Nemotron")
        .replace("OLMo", "Nemotron")
        .replace("from neuronx", "import torch\nfrom neuronx", 1)
    )


def norm_test() -> str:
    """The test of norm and embeddings."""
    test = _named(olmo_agents.norm_test()).replace("NemotronLayerNorm\n", "NemotronLayerNorm1P\n")
    start, end = test.index("\n\ndef test_norm"), test.index("\n\ndef test_embedding")
    return test[:start] + _NORM_TEST.rstrip("\n") + "\n" + test[end:]


def _named(test: str) -> str:
    tiny = {name: value for name, value in CONFIG.items() if name not in ("architectures", "use_qk_norm")}
    test = test.replace(repr(olmo_agents.tiny()), repr(tiny))
    return test.replace("Olmo", "Nemotron").replace("models.olmo.modeling_olmo", "models.nemotron.modeling_nemotron")


def make_nemotron(root: Path) -> Path:
    """The HF folder of the tiny model, with perturbed weights."""
    (root / "source").mkdir(parents=True)
    (root / "source" / "config.json").write_text(json.dumps(CONFIG))
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 3, tiny=False).folder
