"""The example port, tiny Llama shapes, and HuggingFace's answer for them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from equiport.content import content_dir

PORT = content_dir("examples") / "llama" / "modeling_llama_nxdi.py"
CAUSAL, INNER, CONFIG = "NeuronLlamaForCausalLM", "NeuronLlamaModel", "LlamaInferenceConfig"
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
PROMPTS = (5, 17, 9)


def reference(folder: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """HuggingFace logits [rows, 6, V] float32 at the last prompt position and the five after it."""
    model: nn.Module = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        whole = [model(torch.tensor([row])).logits[0] for row in sequences]
    return torch.stack([row[end - 1 : end + 5] for row, end in zip(whole, PROMPTS, strict=True)]).float()


def relative(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 distance."""
    return float((got - wanted).norm() / wanted.norm())
