"""The stack's own decoders, served with a checkpoint in Hugging Face's names, beside Hugging Face's model."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from registry import case, outcome
from safetensors.torch import save_file
from sessions import prompts, session
from torch import Tensor
from world import one_rank

SIZES: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLP = ("gate_proj", "up_proj", "down_proj")
# The base of the rotation is the default of Hugging Face's class.
BASES = {"mixtral": 1e6, "qwen3": 1e4, "qwen3_moe": 1e4}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"class": "Mixtral", "more": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}},
    "qwen3": {"class": "Qwen3", "more": {"attention_bias": False}},
    "qwen3_moe": {"class": "Qwen3Moe", "more": {**MOE, "norm_topk_prob": True, "decoder_sparse_step": 1}},
}


def checkpoint(kind: str) -> dict[str, Tensor]:
    """Weights of unit scale under the names of Hugging Face's files."""
    hidden, inner, heads, keys = 32, 24 if kind == "qwen3_moe" else 48, 32, 16
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (62, hidden),
        "lm_head.weight": (62, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(2):
        own = f"model.layers.{layer}"
        attention = {"q_proj": (heads, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        attention["o_proj"] = (hidden, heads)
        shapes.update({f"{own}.self_attn.{name}.weight": shape for name, shape in attention.items()})
        shapes.update({f"{own}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")})
        if kind != "mixtral":
            shapes.update({f"{own}.self_attn.{name}_norm.weight": (8,) for name in "qk"})
        block, names = {
            "mixtral": (f"{own}.block_sparse_moe", ("w1", "w3", "w2")),
            "qwen3": (f"{own}.mlp", MLP),
            "qwen3_moe": (f"{own}.mlp", MLP),
        }[kind]
        places = [block]
        if kind != "qwen3":
            shapes[f"{block}.gate.weight"] = (4, hidden)
            places = [f"{block}.experts.{expert}" for expert in range(4)]
        for place in places:
            shapes.update({f"{place}.{name}.weight": (inner, hidden) for name in names[:2]})
            shapes[f"{place}.{names[2]}.weight"] = (hidden, inner)
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        if len(shape) > 1
        else 1 + 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def folder(kind: str) -> str:
    """A folder as Hugging Face writes it."""
    import transformers

    path = tempfile.mkdtemp(prefix="equiport-hub-")
    more = MODELS[kind]["more"]
    getattr(transformers, f"{MODELS[kind]['class']}Config")(**SIZES, **more).save_pretrained(path)
    save_file(checkpoint(kind), f"{path}/model.safetensors", metadata={"format": "pt"})
    return path


def hub(kind: str, path: str, started: bool = False, **flags: Any) -> Any:
    """The stack's model, served on the CPU; `started`: the groups are its own affair."""
    if not started:
        one_rank()
    import importlib

    module = importlib.import_module(f"neuronx_distributed_inference.models.{kind}.modeling_{kind}")
    wanted = getattr(module, f"Neuron{MODELS[kind]['class']}ForCausalLM")
    config_cls = wanted.get_config_cls()
    sizes = {"batch_size": 2, "seq_len": 16, "torch_dtype": torch.float32, "on_cpu": True, "padding_side": "right"}
    served = config_cls.get_neuron_config_cls()(**{**sizes, "tp_degree": 1, **flags})
    described = {**SIZES, **MODELS[kind]["more"], "rope_theta": BASES[kind], "rope_scaling": None}
    model = wanted(path, config_cls(served, **described, output_attentions=False, output_hidden_states=False))
    model.to_cpu()
    return model


def source(path: str) -> Any:
    """Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()


def beside_the_source(found: dict[str, Tensor], path: str) -> dict[str, bool]:
    """Whether each step's logits are the source's to 1e-5."""
    ids, mask, _ = prompts()
    more = [torch.randint(1, 61, (2, 1), generator=torch.Generator().manual_seed(50 + turn)) for turn in range(3)]
    model, out = source(path), {}
    for turn, name in enumerate(found):
        rows = []
        for row in range(2):
            prompt = ids[row, : int(mask[row].sum())]
            rows.append(model(torch.cat([prompt, *(step[row] for step in more[:turn])])[None]).logits[0, -1])
        wanted = torch.stack(rows)
        out[name] = float((found[name][:, -1] - wanted).norm() / wanted.norm()) < 1e-5
    return out


def _served(kind: str) -> dict[str, Any]:
    path = folder(kind)
    out: dict[str, Any] = session(hub(kind, path))
    out["beside the source"] = beside_the_source(out, path)
    out["bfloat16"] = session(hub(kind, path, torch_dtype=torch.bfloat16))
    return out


@case
def mixtral() -> dict[str, Any]:
    path = folder("mixtral")
    return {**_served("mixtral"), "capacity": session(hub("mixtral", path, capacity_factor=0.75))}


@case
def qwen3() -> dict[str, Any]:
    path = folder("qwen3")
    return {**_served("qwen3"), "fused": session(hub("qwen3", path, fused_qkv=True))}


@case
def qwen3_moe() -> dict[str, Any]:
    path = folder("qwen3_moe")
    blocks = {"blockwise_matmul_config": {"block_size": 4}}
    wide = {"blockwise_matmul_config": {"use_shard_on_intermediate_dynamic_while": True}}
    return {
        **_served("qwen3_moe"),
        "blocks": session(hub("qwen3_moe", path, **blocks)),
        "fused": session(hub("qwen3_moe", path, fused_qkv=True)),
        "widened": session(hub("qwen3_moe", path, **wide)),
        "padded tokens": session(hub("qwen3_moe", path, moe_mask_padded_tokens=True, **blocks)),
        "no glu": outcome(lambda: hub("qwen3_moe", path, glu_mlp=False)),
    }
