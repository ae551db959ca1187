"""Scores taken in bf16 where the source takes them in fp32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equiport.bench.portbugs.operator import edit_output, wrap_forward
from equiport.localize.causes import precision
from equiport.localize.search import Explanation, explain_precision
from tests.localize.defects import low_cases, model_folder

WORDS = "the scores (q k^T) of"
# sources that make their scale in the model's dtype have it exact: heads of 16
SIZES: dict[str, Any] = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
GPTJ: dict[str, Any] = {
    **SIZES, "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 2,
    "rotary_dim": 8, "n_positions": 128,
}  # fmt: skip
CODEGEN: dict[str, Any] = {**GPTJ, "architectures": ["CodeGenForCausalLM"], "model_type": "codegen"}
NEO: dict[str, Any] = {
    **SIZES, "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo", "hidden_size": 48, "num_heads": 4,
    "num_layers": 2, "max_position_embeddings": 128, "attention_types": [[["global", "local"], 1]], "window_size": 8,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """As a stack's base class does it: scores in the dtype of q, a mask of booleans, the softmax in fp32."""
    scores = torch.matmul(q, k.transpose(2, 3)) / (1 / scaling)
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.matmul(weights, v), weights


def causal(q: Tensor, window: int) -> Tensor:
    length = q.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen & ~seen.tril(-window) if window else seen


def low_core(model: nn.Module) -> None:
    """The first attention by its file's eager attention, rewritten."""
    module: Any = model.get_submodule("transformer.h.0.attn")
    file: Any = sys.modules[type(module).__module__]
    if not hasattr(file, "eager_attention_forward"):  # transformers 4
        module._attn = lambda q, k, v, *_: attended(q.to(v.dtype), k.to(v.dtype), v, causal(q, 0), 16**-0.5)
        return

    def core(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        out, weights = attended(q, k, v, causal(q, 0), scaling)
        return out.transpose(1, 2).contiguous(), weights

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kept = file.eager_attention_forward
        file.eager_attention_forward = core
        try:
            return original(*args, **kwargs)
        finally:
            file.eager_attention_forward = kept

    wrap_forward(module, run)


def low_method(model: nn.Module) -> None:
    """The second attention, which is local, by its own method: no scale."""
    module: Any = model.get_submodule("transformer.h.1.attn.attention")
    module._attn = lambda q, k, v, mask=None, *_: attended(q, k, v, causal(q, NEO["window_size"]), 1.0)


def explained(root: Path, config: dict[str, Any], path: str, inject: Callable[[nn.Module], None]) -> Explanation:
    torch.set_num_threads(1)
    pairs = [low_cases(model_folder(root, config, seed), path, inject, seed) for seed in (11, 12)]
    return explain_precision([low for low, _ in pairs], [exact for _, exact in pairs], 1.1)


SOURCES = [
    pytest.param(GPTJ, "transformer.h.0.attn", low_core, id="gptj"),
    pytest.param(CODEGEN, "transformer.h.0.attn", low_core, id="codegen"),
    pytest.param(NEO, "transformer.h.1.attn.attention", low_method, id="gpt_neo"),
]


@pytest.mark.parametrize(("config", "path", "inject"), SOURCES)
def test_scores_in_bf16_are_proven(
    tmp_path: Path, config: dict[str, Any], path: str, inject: Callable[[nn.Module], None]
) -> None:
    found = explained(tmp_path, config, path, inject)
    best = found.ranked[0]
    assert found.proven and best.says.startswith(f"{WORDS} {path} are taken in bf16")
    assert best.r32 < 0.1 * found.before


def summed_in_parts(model: nn.Module, path: str) -> None:
    """A right attention, sharded: its last projection in two sums, added in bf16."""
    linear: Any = next(module for name, module in model.get_submodule(path).named_modules() if name == "out_proj")

    def run(_: Callable[..., Any], x: Tensor) -> Tensor:
        parts = zip(x.chunk(2, dim=-1), linear.weight.chunk(2, dim=-1), strict=True)
        first, second = (nn.functional.linear(*part) for part in parts)
        return first + second + (0 if linear.bias is None else linear.bias)

    wrap_forward(linear, run)


OTHERS: dict[str, Callable[[nn.Module, str], None]] = {
    "right": lambda model, path: None,
    "sharded": summed_in_parts,
    "scaled": lambda model, path: edit_output(model.get_submodule(path), lambda out: out * 1.01),
}


@pytest.mark.parametrize(("config", "path", "inject"), SOURCES)
@pytest.mark.parametrize("other", OTHERS)
def test_another_attention_is_not_explained_by_them(
    tmp_path: Path, config: dict[str, Any], path: str, inject: Callable[[nn.Module], None], other: str
) -> None:
    found = explained(tmp_path, config, path, lambda model: OTHERS[other](model, path))
    assert found.before < 1e-6 if other == "right" else found.before > 0.1
    assert not (found.proven and found.ranked[0].says.startswith(WORDS))


def test_a_source_that_takes_them_in_bf16_has_no_such_defect(tmp_path: Path) -> None:
    path = "model.layers.0.self_attn"
    low, _ = low_cases(model_folder(tmp_path, LLAMA, 11), path, lambda model: None, 11)
    says = [item.says for item in precision.candidates(low)]
    assert says and not any(words.startswith(WORDS) for words in says)
