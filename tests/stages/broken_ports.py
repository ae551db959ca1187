"""Ways to break, and ways to rewrite, the example Llama port: each turns its source text into another port's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama" / "modeling_llama_nxdi.py"


@dataclass(frozen=True)
class PortEdit:
    """An edit of the example port. `stage` and `component` (a part of its name) hold the fault; both None: correct.
    `cause`: the kind of root cause that localisation must prove; None where stage 0 names the tensor itself."""

    name: str
    edit: Callable[[str], str]
    stage: int | None = None
    component: str | None = None
    split: int | None = None
    cause: str | None = None


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    """Replace texts; each must be there."""

    def edit(source: str) -> str:
        for old, new in pairs:
            assert old in source, old
            source = source.replace(old, new)
        return source

    return edit


def _in_attention(methods: str) -> Callable[[str], str]:
    return replaced(("\n\nclass NeuronLlamaMLP(nn.Module):", f"\n{methods}\n\nclass NeuronLlamaMLP(nn.Module):"))


def _in_conversion(statements: str) -> Callable[[str], str]:
    return replaced(("        ranks = torch.arange", f"{statements}\n        ranks = torch.arange"))


_INTERLEAVED = """
    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids)

        def turn(x):
            half = x.shape[-1] // 2
            cos = cos_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
            sin = sin_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
            return x * cos + turned * sin

        return turn(Q), turn(K), cos_cache, sin_cache
"""

_SDPA = """
    def perform_prefill(self, Q, K, V, q_len, bsz, attention_mask):
        from neuronx_distributed_inference.modules.attention.attention_base import FlashAttentionStrategy

        groups = Q.shape[1] // K.shape[1]
        K, V = K.repeat_interleave(groups, dim=1), V.repeat_interleave(groups, dim=1)
        output = nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=attention_mask.bool())
        return output, FlashAttentionStrategy.NONE
"""


def ids_masked(token: str) -> Callable[[str], str]:
    """In prefill an id is no key, wherever it stands; `token`: an expression over `self`, which has `pad` and `end`."""
    forward = f"""    def forward(self, input_ids, attention_mask, *args, **kwargs):
        if input_ids.shape[-1] > 1 and {token} is not None:
            attention_mask = attention_mask * (input_ids != {token}).to(attention_mask.dtype)
        return super().forward(input_ids, attention_mask, *args, **kwargs)

    def create_attn_mask(self, attention_mask, is_for_context_encoding, is_for_speculation, **kwargs):
        mask = super().create_attn_mask(attention_mask, is_for_context_encoding, is_for_speculation, **kwargs)
        return mask & attention_mask[:, None, None, :].bool() if is_for_context_encoding else mask

"""
    init = "    def init_model(self, config: LlamaInferenceConfig) -> None:\n"
    return replaced(
        (init, forward + init),
        (
            "        if not parallel_state",
            "        self.pad, self.end = config.pad_token_id, config.eos_token_id\n        if not parallel_state",
        ),
    )


_BF16_VARIANCE = """class LowNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


def make_rmsnorm"""

_DEAF_NORM = """class DeafNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) / self.weight


def make_rmsnorm"""

_OWN_NORM = """class OwnNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return nn.functional.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


def make_rmsnorm"""

_FREQUENCIES_AS_BUFFER = """class BufferedRotary(nn.Module):
    def __init__(self, dim, max_position_embeddings=0, base=10000.0, factor=None):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[:, :, None].float() * self.inv_freq[None, None].float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class NeuronLlamaMLP(nn.Module):"""

_NORM_LINE = "norm = LlamaRMSNorm if cpu_mode() else CustomRMSNorm"


def _kv_heads_replicated(rows: str) -> Callable[[str], str]:
    return replaced(
        ("num_key_value_heads=config.num_key_value_heads,", "num_key_value_heads=config.num_attention_heads,"),
        (
            "self.num_key_value_heads = config.num_key_value_heads",
            "self.num_key_value_heads = config.num_attention_heads",
        ),
        (
            "        ranks = torch.arange",
            f"""        times = config.num_attention_heads // config.num_key_value_heads
        for name in list(converted):
            if ".k_proj." in name or ".v_proj." in name:
                heads = converted[name].view(config.num_key_value_heads, config.head_dim, -1)
                converted[name] = {rows}.reshape(-1, heads.shape[-1]).contiguous()
        ranks = torch.arange""",
        ),
    )


_SPLIT_DOWN = """        parts = zip(gated.chunk(4, -1), self.down_proj.weight.chunk(4, 1))
        return sum(nn.functional.linear(inputs, rows) for inputs, rows in parts)"""

_EMBEDDED = "        self.layers = nn.ModuleList("


def _embedding_scaled(undone: str) -> Callable[[str], str]:
    """The embedding gives four times the source's, and the first layer undoes it, or not quite."""
    return replaced(
        (
            _EMBEDDED,
            "        self.embed_tokens.register_forward_hook(lambda module, inputs, output: output * 4.0)\n"
            + _EMBEDDED,
        ),
        (
            "        self.norm = make_rmsnorm(config)",
            "        self.layers[0].register_forward_pre_hook(\n"
            f"            lambda module, inputs: (inputs[0] * {undone}, *inputs[1:])\n        )\n"
            "        self.norm = make_rmsnorm(config)",
        ),
    )


def _mlp_scaled(undone: str) -> Callable[[str], str]:
    """The MLP gives twice the source's, and what adds it takes a half, or not quite."""
    return replaced(
        ("        return self.down_proj(gated)", "        return self.down_proj(gated) * 2.0"),
        (
            "self.mlp(self.post_attention_layernorm(hidden_states))",
            f"{undone} * self.mlp(self.post_attention_layernorm(hidden_states))",
        ),
    )


def _mlp_padded(down: str) -> Callable[[str], str]:
    """The MLP's inner width in whole tiles of 64; `down`: what the padding of down_proj's weight is, before and after,
    is given to `pad`. The channels added to gate and up are ones."""
    return replaced(
        (
            "hidden, intermediate = config.hidden_size, config.intermediate_size",
            "hidden, intermediate = config.hidden_size, -(-config.intermediate_size // 64) * 64",
        ),
        (
            "        ranks = torch.arange",
            f"""        more, pad = -config.intermediate_size % 64, torch.nn.functional.pad
        for name in list(converted):
            if ".gate_proj." in name or ".up_proj." in name:
                converted[name] = pad(converted[name], (0, 0, 0, more), value=1.0)
            elif ".down_proj." in name:
                converted[name] = {down}
        ranks = torch.arange""",
        ),
    )


CORRECT = (
    PortEdit("unchanged", lambda source: source),
    PortEdit("sdpa in prefill", _in_attention(_SDPA)),
    PortEdit("fused norm", replaced((_NORM_LINE, "norm = OwnNorm"), ("def make_rmsnorm", _OWN_NORM))),
    PortEdit("kv heads repeated by the port", _kv_heads_replicated("heads.repeat_interleave(times, dim=0)")),
    PortEdit("embedding scaled, and the scale undone", _embedding_scaled("0.25")),
    PortEdit("MLP doubled, and halved where it is added", _mlp_scaled("0.5")),
    PortEdit("reduction split in 4", replaced(("        return self.down_proj(gated)", _SPLIT_DOWN)), split=4),
    PortEdit("MLP padded to whole tiles", _mlp_padded("pad(converted[name], (0, more))")),
)

BROKEN = (
    PortEdit("MLP padded, and it counts", _mlp_padded("pad(converted[name], (0, more), value=1e-3)"), 2, "mlp"),
    PortEdit("MLP padded on the wrong side", _mlp_padded("pad(converted[name], (more, 0))"), 2, "mlp"),
    PortEdit(
        "embedding scaled, and the scale not undone",
        _embedding_scaled("1.0"),
        2,
        "embed",
        cause="scale or multiplier",
    ),
    PortEdit("MLP doubled, and less than halved", _mlp_scaled("0.4995"), 2, "mlp", cause="scale or multiplier"),
    PortEdit(
        "a token's row zeroed at run time, among scaled ones",
        lambda source: replaced(
            (
                "output * 4.0",
                "torch.where((inputs[0] == 7)[..., None], output * 0.0, output * 4.0)",
            )
        )(_embedding_scaled("0.25")(source)),
        2,
        "embed_tokens",
    ),
    PortEdit("ends inside a prompt taken for padding", ids_masked("self.end"), 2, "self_attn"),
    PortEdit("rotation interleaved", _in_attention(_INTERLEAVED), 2, "self_attn", cause="rotation style"),
    PortEdit(
        "gate and up swapped",
        _in_conversion(
            """        for name in [key for key in converted if ".gate_proj." in key]:
            other = name.replace("gate_proj", "up_proj")
            converted[name], converted[other] = converted[other], converted[name]"""
        ),
        2,
        "mlp",
        cause="gate/up order",
    ),
    PortEdit("eps", replaced(("eps=config.rms_norm_eps)", "eps=config.rms_norm_eps / 10)")), 2, "norm", cause="eps"),
    PortEdit(
        "kv heads tiled",
        _kv_heads_replicated("heads.repeat(times, 1, 1)"),
        2,
        "self_attn",
        cause="head order or replication",
    ),
    PortEdit(
        "kv heads tiled and rotation interleaved",
        lambda source: _in_attention(_INTERLEAVED)(_kv_heads_replicated("heads.repeat(times, 1, 1)")(source)),
        2,
        "self_attn",
        cause="head order or replication + rotation style",
    ),
    PortEdit(
        "o_proj transposed",
        _in_conversion(
            """        for name in [key for key in converted if ".o_proj.weight" in key]:
            converted[name] = converted[name].t().contiguous()"""
        ),
        2,
        "o_proj",
        cause="transpose",
    ),
    PortEdit(
        "norm weight ignored",
        replaced((_NORM_LINE, "norm = DeafNorm"), ("def make_rmsnorm", _DEAF_NORM)),
        2,
        "norm",
        cause="norm kind",
    ),
    PortEdit(
        "decode position off by one",
        replaced(
            (
                "        attention = self.self_attn(",
                "        if past_key_value is not None:\n            position_ids = position_ids + 1\n"
                "        attention = self.self_attn(",
            )
        ),
        2,
        "self_attn",
        cause="position offset",
    ),
    PortEdit(
        "the first row's positions for all rows",
        replaced(
            (
                "        attention = self.self_attn(",
                "        if past_key_value is not None:\n"
                "            position_ids = position_ids[:1].expand_as(position_ids)\n"
                "        attention = self.self_attn(",
            )
        ),
        2,
        "self_attn",
        cause="batch row mixed up",
    ),
    PortEdit(
        "lm_head not tied",
        replaced(('        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()', "        pass")),
        0,
        "lm_head",
    ),
    PortEdit(
        "a layer's weights in another",
        _in_conversion(
            '        converted["layers.1.mlp.down_proj.weight"] = converted["layers.2.mlp.down_proj.weight"].clone()'
        ),
        0,
        "layers.1.mlp.down_proj",
        cause="wrong layer's weights",
    ),
    PortEdit(
        "rope theta x1.001",
        replaced(("base=config.rope_theta,", "base=config.rope_theta * 1.001,")),
        2,
        "rotary_emb",
        cause="rope scaling or base",
    ),
    PortEdit(
        "frequencies cast with the model",
        replaced(
            ("class NeuronLlamaMLP(nn.Module):", _FREQUENCIES_AS_BUFFER),
            ("        return RotaryEmbedding(", "        return BufferedRotary("),
        ),
        2,
        "rotary_emb",
        cause="precision order",
    ),
    PortEdit(
        "variance in bf16",
        replaced((_NORM_LINE, "norm = LowNorm"), ("def make_rmsnorm", _BF16_VARIANCE)),
        2,
        "norm",
        cause="precision order",
    ),
    PortEdit(
        "second norm skipped",
        replaced(("self.mlp(self.post_attention_layernorm(hidden_states))", "self.mlp(hidden_states)")),
        2,
        "post_attention_layernorm",
        cause="norm kind",
    ),
    PortEdit(
        "attention residual dropped",
        replaced(
            ("hidden_states = hidden_states + attention.hidden_states", "hidden_states = attention.hidden_states")
        ),
        2,
        "layers.{i}",
        cause="residual layout or multiplier",
    ),
    PortEdit(
        "one weight off",
        _in_conversion(
            """        converted["layers.0.mlp.up_proj.weight"] = converted["layers.0.mlp.up_proj.weight"].clone()
        converted["layers.0.mlp.up_proj.weight"][3, 5] += 0.05"""
        ),
        0,
        "up_proj",
    ),
    PortEdit(
        "two tokens' rows swapped",
        _in_conversion(
            """        rows = converted["embed_tokens.weight"].clone()
        rows[[7, 8]] = rows[[8, 7]]
        converted["embed_tokens.weight"] = rows"""
        ),
        0,
        "embed_tokens",
    ),
    PortEdit(
        "padding row zeroed",
        _in_conversion(
            """        converted["embed_tokens.weight"] = converted["embed_tokens.weight"].clone()
        converted["embed_tokens.weight"][0] = 0"""
        ),
        0,
        "embed_tokens",
    ),
    PortEdit(
        "one norm weight x1.01 at run time",
        replaced(
            (
                "        self.norm = make_rmsnorm(config)",
                "        self.norm = make_rmsnorm(config)\n"
                "        self.norm.register_forward_hook(lambda module, inputs, output: output * 1.01)",
            )
        ),
        2,
        "norm",
        cause="scale or multiplier",
    ),
)

_ON_CPU = (_NORM_LINE, "norm = LowNorm if cpu_mode() else CustomRMSNorm"), ("def make_rmsnorm", _BF16_VARIANCE)
LOW_NORM_ON_CPU = PortEdit("variance in bf16 on the CPU alone", replaced(*_ON_CPU))
LOW_NORM_ON_CPU_WRONG_EPS = PortEdit(
    "variance in bf16 on the CPU alone, and eps",
    replaced(*_ON_CPU, ("eps=config.rms_norm_eps)", "eps=config.rms_norm_eps * 100)")),
)
