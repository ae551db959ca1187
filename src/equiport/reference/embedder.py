"""The source model as an embedder: the HF class on the CPU, eager attention, pooled as its files say."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.fixtures.embedding_plan import EmbeddingItem, Encode
from equiport.fixtures.folder import read_config, tensor_headers
from equiport.reference.model import quiet_transformers
from equiport.reference.pooling import Pooling, pool

#: Where padding goes. `left`: with positions that start at each row's first token; `left-own`: as the class has them.
Side = Literal["right", "left", "left-own"]
_UNUSED = ("pooler.", "lm_head.", "cls.", "score.", "classifier.")  # heads that hidden states do not pass


class Embedder:
    """A source model in one dtype and one of its class's attention implementations.

    Raises:
        EquiportError: transformers does not know it, weights lack tensors that hidden states need, or it has a decoder
            beside its encoder.
    """

    def __init__(self, pooling: Pooling, dtype: torch.dtype, attention: str = "eager") -> None:
        self.pooling, self.dtype = pooling, dtype
        self.model, self.unread = _load(pooling.backbone, dtype, attention)
        self._takes = frozenset(inspect.signature(self.model.forward).parameters)

    @property
    def class_name(self) -> str:
        """Of transformers."""
        return type(self.model).__name__

    def alone(self, items: Sequence[EmbeddingItem]) -> Tensor:
        """float32 [N, D]: each item by itself, without padding.

        Raises:
            EquiportError: the source model's own vector is NaN, infinite or zero.
        """
        found = torch.cat([self.embed([item], "right") for item in items])
        for number, row in enumerate(found):
            if not torch.isfinite(row).all() or not row.norm() > 0:
                kind = str(self.dtype).removeprefix("torch.")
                raise EquiportError(
                    f"the source model itself gives NaN, infinity or zero for prompt {number} in {kind}",
                    where=self.pooling.backbone,
                    remedy="Check weights and pooling.",
                )
        return found

    def embed(self, batch: Sequence[EmbeddingItem], side: Side) -> Tensor:
        """float32 [B, D] of one batch."""
        hidden, mask = self.hidden(batch, side)
        vectors = pool(hidden, mask, self.pooling.mode)
        return nn.functional.normalize(vectors, dim=-1) if self.pooling.normalize else vectors

    def hidden(
        self, batch: Sequence[EmbeddingItem], side: Side, mask_4d: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states [B, T, H] and mask [B, T] of one batch; `mask_4d` replaces the mask of the attention."""
        width = max(len(item.ids) for item in batch)
        pad = self.model.config.pad_token_id
        vocabulary = int(getattr(self.model.config, "vocab_size", 0) or 0)
        ids = torch.full((len(batch), width), pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(batch):
            start = 0 if side == "right" else width - len(item.ids)
            ids[row, start : start + len(item.ids)] = torch.tensor(item.ids)
            mask[row, start : start + len(item.ids)] = 1
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask if mask_4d is None else mask_4d}
        if side == "left" and "position_ids" in self._takes:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        if "use_cache" in self._takes:
            inputs["use_cache"] = False
        with torch.no_grad():
            return self.model(**inputs).last_hidden_state, mask


def check_lengths(pooling: Pooling, items: Sequence[EmbeddingItem]) -> None:
    """Nothing is cut off.

    Raises:
        EquiportError: a prompt is longer than the model takes, or an id is outside the vocabulary.
    """
    config = read_config(pooling.backbone)
    limits = [pooling.longest, config.get("max_position_embeddings")]
    longest = min((limit for limit in limits if isinstance(limit, int)), default=None)
    vocabulary = config.get("vocab_size")
    for number, item in enumerate(items):
        if longest is not None and len(item.ids) > longest:
            raise EquiportError(
                f"prompt {number} has {len(item.ids)} tokens, the model takes {longest}",
                where=pooling.backbone,
                field="--prompts",
                remedy="Shorten it.",
            )
        if isinstance(vocabulary, int) and max(item.ids) >= vocabulary:
            raise EquiportError(
                f"prompt {number} holds id {max(item.ids)}, vocab_size is {vocabulary}",
                where=pooling.backbone,
                field="--prompts",
                remedy="Give ids of this model's tokenizer.",
            )


def encoder_of(pooling: Pooling) -> Encode | None:
    """The source's tokenizer as a function: text -> token ids with special tokens; None where the folder has none.

    Raises:
        EquiportError: its files do not load.
    """
    folder = pooling.backbone
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        return None
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        except Exception as error:  # tokenizers raise all kinds
            raise EquiportError(
                f"its tokenizer does not load: {_first_line(error)}",
                where=folder,
                remedy="Check the tokenizer's files.",
            ) from error

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer(text.lower() if pooling.lower_case else text)["input_ids"]
        return ids

    return encode


def _load(folder: Path, dtype: torch.dtype, attention: str) -> tuple[Any, tuple[str, ...]]:
    """The model, and stored tensors that it does not read."""
    from transformers import AutoModel

    config = read_config(folder)
    tensor_headers(folder)
    if config.get("is_encoder_decoder"):
        raise EquiportError(
            "has an encoder and a decoder: such embedders are not offered",
            where=folder / "config.json",
            field="is_encoder_decoder",
            remedy="Give the encoder's own folder.",
        )
    with quiet_transformers():
        try:
            loaded: Any = AutoModel.from_pretrained(
                str(folder), dtype=dtype, attn_implementation=attention, output_loading_info=True
            )
        except Exception as error:  # config validation and models' constructors raise all kinds
            raise EquiportError(
                f"transformers cannot load it: {_first_line(error)}",
                where=folder,
                remedy="Check config.json and weights.",
            ) from error
    model, info = loaded
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(_UNUSED))
    if missing:
        raise EquiportError(
            f"weights lack {len(missing)} tensors, first {missing[0]}",
            where=folder,
            remedy="Complete the weights: a reference with random tensors proves nothing.",
        )
    if dtype is torch.float32:
        model.float()  # what a constructor makes in another dtype would stay in it
    unread = sorted(name for name in info["unexpected_keys"] if not name.startswith(_UNUSED))
    return model.eval(), tuple(unread)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
