"""Greedy tokens are those of the model's own forward, whatever cache `generate` would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from equiport.reference.logits import greedy

_SIZES = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_PROMPTS = [[5, 9, 31, 44, 8, 17, 93, 22, 71, 60, 12, 3], [7, 19, 2, 88, 41]]


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("olmo", {}),
        ("llama", {"sliding_window": 4}),
        ("olmo", {"sliding_window": 4}),  # a key that the model never reads
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"sliding_window": 4, "head_dim": 12}),
        ("gemma3_text", {"sliding_window": 4, "head_dim": 12}),
        ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}),
        ("openai-gpt", {}),  # its forward takes no cache, and masks no padding
        ("recurrent_gemma", {"attention_window_size": 64}),  # its cache is its own
    ],
)
def test_tokens_are_those_of_whole_forwards(kind: str, extra: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **_SIZES)
    for name, value in extra.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    for prompt, said in zip(_PROMPTS, greedy(model, _PROMPTS, 10), strict=True):
        ids = torch.tensor([prompt])
        for _ in range(10):
            with torch.no_grad():
                last = model(input_ids=ids, use_cache=False).logits[:, -1:]
            ids = torch.cat([ids, last.argmax(-1)], dim=1)
        assert said == ids[0, len(prompt) :].tolist()
