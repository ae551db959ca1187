"""The example port through the adapter computes what HuggingFace computes: prefill, decode, dtypes, variants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, INNER, PORT, PROMPTS, reference, relative
from transformers import LlamaForCausalLM

from equiport.stacks.contract import ModelLimits, StackAdapter
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "no grouping": {"num_key_value_heads": 4},
    "theta and eps": {"rope_theta": 500.0, "rms_norm_eps": 1e-3},
}


def load(adapter: StackAdapter, folder: Path, dtype: torch.dtype, name: str = CAUSAL, batch: int = 2) -> Any:
    model = adapter.create_model(PORT, name, CONFIG, folder, dtype=dtype, batch_size=batch, seq_len=32)
    report = adapter.load_weights(model, folder, dtype)
    assert report.clean, report
    assert len(report.loaded) >= 30
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_in_float32(
    adapter: StackAdapter, make_folder: Callable[..., Path], tokens: list[list[int]], variant: str
) -> None:
    folder = make_folder(**VARIANTS[variant])
    model = load(adapter, folder, torch.float32)
    wanted = reference(folder, tokens)
    decoded = decode_logits(adapter, model, tokens, PROMPTS)
    assert decoded.dtype is torch.float32
    for step in range(6):
        assert relative(decoded[:, step], wanted[:, step]) < 5e-6
    prefilled = prefill_logits(adapter, model, tokens, [length + 3 for length in PROMPTS])
    assert relative(prefilled, wanted[:, 3]) < 5e-6


def test_one_process_serves_float32_then_bfloat16_then_the_inner_class(
    adapter: StackAdapter, plain_folder: Path, tokens: list[list[int]]
) -> None:
    wanted = reference(plain_folder, tokens)
    baseline = relative(reference(plain_folder, tokens, torch.bfloat16), wanted)
    exact = decode_logits(adapter, load(adapter, plain_folder, torch.float32), tokens, PROMPTS)
    rounded = decode_logits(adapter, load(adapter, plain_folder, torch.bfloat16), tokens, PROMPTS)
    inner = load(adapter, plain_folder, torch.float32, INNER, batch=3)
    assert relative(exact, wanted) < 5e-6
    assert 0.3 * baseline < relative(rounded, wanted) < 2.5 * baseline
    assert relative(decode_logits(adapter, inner, tokens, PROMPTS), wanted) < 5e-6
    assert adapter.inner_model(inner) is inner
    assert adapter.limits(inner) == ModelLimits(batch_size=3, seq_len=32)


def test_a_prefill_starts_afresh(adapter: StackAdapter, plain_folder: Path, tokens: list[list[int]]) -> None:
    model = load(adapter, plain_folder, torch.float32)
    first = decode_logits(adapter, model, tokens, PROMPTS)
    decode_logits(adapter, model, [row[::-1] for row in tokens], [7, 3, 2], steps=4)
    assert torch.equal(decode_logits(adapter, model, tokens, PROMPTS), first)


def test_a_row_does_not_see_its_neighbour(adapter: StackAdapter, plain_folder: Path, tokens: list[list[int]]) -> None:
    model = load(adapter, plain_folder, torch.float32)
    with_long = decode_logits(adapter, model, [tokens[0], tokens[1]], PROMPTS[:2])
    with_short = decode_logits(adapter, model, [tokens[0], tokens[2]], [PROMPTS[0], PROMPTS[2]])
    assert relative(with_long[0], with_short[0]) < 1e-6


def test_greedy_equals_huggingface(adapter: StackAdapter, plain_folder: Path, tokens: list[list[int]]) -> None:
    prompts = [row[:length] for row, length in zip(tokens, PROMPTS, strict=True)]
    got = adapter.device_inference(
        str(plain_folder), 1, prompts, 8, target_module_file=PORT, target_class_name=CAUSAL,
        target_config_name=CONFIG, dtype=torch.float32, with_logits=True,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(plain_folder, dtype=torch.float32).eval()
    for prompt, generation in zip(prompts, got, strict=True):
        row = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
        assert generation.tokens == tuple(row[len(prompt) :])
        assert generation.logits is not None
        assert generation.logits.shape == (8, 128)
    stop = got[1].tokens[3]
    model_again = load(adapter, plain_folder, torch.float32)
    ended = adapter.device_inference(str(plain_folder), 1, prompts, 8, model=model_again, eos_token_ids=[stop])
    assert ended[1].tokens == got[1].tokens[: got[1].tokens.index(stop) + 1]


def test_a_faulty_port_is_seen(
    adapter: StackAdapter, plain_folder: Path, tokens: list[list[int]], tmp_path: Path
) -> None:
    faulty = tmp_path / "modeling_faulty_llama.py"
    text = PORT.read_text()
    changed = text.replace("base=config.rope_theta,", "base=config.rope_theta * 1.01,")
    assert changed != text
    faulty.write_text(changed)
    model = adapter.create_model(faulty, CAUSAL, CONFIG, plain_folder, dtype=torch.float32, batch_size=2, seq_len=32)
    assert adapter.load_weights(model, plain_folder, torch.float32).clean
    assert relative(decode_logits(adapter, model, tokens, PROMPTS), reference(plain_folder, tokens)) > 1e-4
