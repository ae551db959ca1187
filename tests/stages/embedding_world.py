"""Tiny embedding models in HF folders, and targets made of their own classes: right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

WIDTH = 64
SMALL: dict[str, Any] = dict(
    vocab_size=262,
    hidden_size=WIDTH,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)


def write_model(folder: Path, kind: str, seed: int = 5) -> Path:
    """A folder of `bert`, `qwen3` or `llama` with drawn weights and a tokenizer of bytes."""
    torch.manual_seed(seed)
    if kind == "bert":
        model: nn.Module = BertModel(BertConfig(**SMALL, pad_token_id=256))
    else:
        config_class, model_class = {"qwen3": (Qwen3Config, Qwen3Model), "llama": (LlamaConfig, LlamaModel)}[kind]
        extra = {"head_dim": 16} if kind == "qwen3" else {}
        model = model_class(config_class(**SMALL, num_key_value_heads=2, pad_token_id=256, **extra))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=1.0 if "embed" in name else 1.6 * parameter.shape[1] ** -0.5)
        else:
            nn.init.normal_(parameter, mean=1.0 if "norm" in name.lower() and "bias" not in name else 0.0, std=0.2)
    model.save_pretrained(str(folder), safe_serialization=True)
    write_tokenizer(folder, encoder=kind == "bert")
    return folder


def write_tokenizer(folder: Path, *, encoder: bool) -> None:
    """One token a byte; [CLS] and [SEP] around it for an encoder, </s> behind it for a decoder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    vocabulary |= {name: 256 + number for number, name in enumerate(("[PAD]", "[CLS]", "[SEP]", "</s>", "[UNK]"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    form = "[CLS] $A [SEP]" if encoder else "$A </s>"
    names = [name for name in form.split() if name != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[(name, vocabulary[name]) for name in names]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        str(folder)
    )


def write_modules(folder: Path, mode: str, *, normalize: bool) -> Path:
    """The sentence-transformers files."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, _ in kinds[1:]:
        (folder / path).mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **flags}))
    return folder


#: Short ones, of unequal lengths: models of bytes are slow on long texts.
PROMPTS = (
    "Tin melts at 232 C.", "Who painted the blue horse?", "x = [i for i in range(9)]", "Salt", "SELECT 1;",
    "The ferry left without its captain.", "A mutex guards the queue.", "while (p) p = p->next;", "Rain all night",
    "Bees dance to tell the others where.", "pH 7 is neutral", "She hid the letter under the clock",
)  # fmt: skip


def write_prompts(path: Path) -> Path:
    """One a line."""
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def lean(folder: Path, shift: float) -> Path:
    """Add one vector to every hidden state of a `bert`: embeddings of unrelated prompts come near one another."""
    file = folder / "model.safetensors"
    weights = load_file(str(file))
    name = next(name for name in weights if name.endswith("layer.1.output.LayerNorm.bias"))
    weights[name] = weights[name] + shift * torch.linspace(0.5, 1.5, WIDTH)
    save_file(weights, str(file), metadata={"format": "pt"})
    return folder


PoolRows = Callable[[Tensor, Tensor], Tensor]


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Over real tokens."""
    weights = mask.unsqueeze(-1).float()
    return (hidden * weights).sum(1) / weights.sum(1)


def last(hidden: Tensor, mask: Tensor) -> Tensor:
    """The last real token, padded on either side."""
    places = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return hidden[torch.arange(len(hidden)), places]


def first(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first real token."""
    return hidden[torch.arange(len(hidden)), mask.argmax(1)]


class Port:
    """A target of its own: pads, masks, runs the HF class and pools; what is wrong is said by the arguments."""

    def __init__(
        self,
        folder: Path,
        rows: PoolRows,
        *,
        dtype: torch.dtype = torch.bfloat16,
        attention: str = "sdpa",
        normalize: bool = True,
        side: str = "right",
        masked: bool = True,
        causal: bool | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model: Any = AutoModel.from_pretrained(str(folder), dtype=dtype, attn_implementation=attention).eval()
        self.rows, self.normalize, self.side, self.masked, self.causal = rows, normalize, side, masked, causal
        self.after = after
        # a bert of transformers 4 takes masks of three dimensions, all others of four
        self.flat = self.model.config.model_type == "bert" and transformers.__version__.startswith("4.")

    def __call__(self, batch: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), 256)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(batch):
            start = 0 if self.side == "right" else width - len(tokens)
            ids[row, start : start + len(tokens)] = torch.tensor(list(tokens))
            mask[row, start : start + len(tokens)] = 1
        seen: Tensor = mask if self.masked else torch.ones_like(mask)
        if self.causal is not None:
            shown = torch.ones(width, width).tril() if self.causal else torch.ones(width, width)
            allowed = shown.bool()[None] & seen.bool()[:, None] | torch.eye(width).bool()[None]
            blocked = torch.finfo(self.model.dtype).min
            if self.flat:
                return self._pooled(ids, mask, allowed.long())
            seen = torch.zeros(allowed.shape).masked_fill(~allowed, blocked).to(self.model.dtype)[:, None]
        return self._pooled(ids, mask, seen)

    def _pooled(self, ids: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            hidden = self.model(input_ids=ids, attention_mask=seen, position_ids=positions).last_hidden_state.float()
        found = self.rows(hidden, mask)
        found = nn.functional.normalize(found, dim=-1) if self.normalize else found
        return self.after(found) if self.after else found
