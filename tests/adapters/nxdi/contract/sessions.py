"""A served tiny model and a ragged session on it: prefill of two rows, then decode steps."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from world import described, fill, one_rank, served

LENGTHS = (7, 4)
WIDTH = 16


def prompts(rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, positions) of right-padded prompts, positions 1 where padded."""
    lengths = torch.tensor([LENGTHS[row % 2] + row // 2 for row in range(rows)])
    longest = int(lengths.max())
    mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    ids = torch.randint(1, 61, (rows, longest), generator=torch.Generator().manual_seed(2)) * mask
    return ids, mask, torch.arange(longest)[None].expand(rows, -1).masked_fill(mask == 0, 1)


def tiny_weights(**attributes: Any) -> dict[str, Tensor]:
    """A checkpoint of the tiny port, unit scale."""
    one_rank()
    from tiny_port import TinyModel

    state = fill(TinyModel(described(**attributes), optimize_inference=False)).state_dict()
    renamed = {key.replace("qkv_proj.", "").replace("o_proj.o_proj", "o_proj"): value for key, value in state.items()}
    return {f"model.{key}": value.clone() for key, value in renamed.items() if "rank" not in key}


def tiny(
    flags: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
    port: str = "TinyForCausalLM",
    **attributes: Any,
) -> Any:
    """The tiny port (a class of tiny_port), served on the CPU with a checkpoint of its own."""
    one_rank()
    import tiny_port

    folder = tempfile.mkdtemp(prefix="equiport-tiny-")
    save_file(tiny_weights(**attributes) if weights is None else weights, f"{folder}/model.safetensors")
    model = getattr(tiny_port, port)(folder, described(served(**{"seq_len": WIDTH, **(flags or {})}), **attributes))
    model.to_cpu()
    return model


def prefill(model: Any, rows: int = 2, **changes: Any) -> Tensor:
    """Logits [B, 1, V] of the prompts' next tokens."""
    ids, mask, positions = prompts(rows)
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "seq_ids": torch.arange(rows)}
    return model(**{**call, **changes}).logits


def decode(model: Any, turn: int = 0, rows: int = 2, beyond: int = 0, **changes: Any) -> Tensor:
    """Logits [B, 1, V] after one more token; `beyond` counts cache entries too many in the mask."""
    _, mask, _ = prompts(rows)
    lengths = mask.sum(1) + turn
    ids = torch.randint(1, 61, (rows, 1), generator=torch.Generator().manual_seed(50 + turn))
    seen = (torch.arange(int(lengths.max()) + beyond)[None] < (lengths + beyond)[:, None]).long()
    call = {"input_ids": ids, "attention_mask": seen, "position_ids": lengths[:, None], "seq_ids": torch.arange(rows)}
    return model(**{**call, **changes}).logits


def session(model: Any, steps: int = 3, rows: int = 2) -> dict[str, Any]:
    """Prefill and `steps` decode steps."""
    out = {"prefill": prefill(model, rows)}
    out.update({f"decode {turn}": decode(model, turn, rows) for turn in range(steps)})
    return out
