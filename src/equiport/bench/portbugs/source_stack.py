"""A stack whose ports are transformers' own classes with a defect put into them: what the corpus of bugs runs on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equiport.reference.model import load_reference, quiet_transformers
from equiport.stacks.contract import (
    Generation,
    LoadReport,
    ModelLimits,
    NotOffered,
    StackAdapter,
    StackStatus,
    Tier,
)

Defect = Callable[[nn.Module], None]


class SourcePort(nn.Module):
    """A port that is the source model with a defect; `inner` is made anew with every load of weights."""

    def __init__(self, folder: Path, dtype: torch.dtype, batch_size: int, seq_len: int, defect: Defect) -> None:
        super().__init__()
        self.batch_size, self.seq_len, self.defect = batch_size, seq_len, defect
        self.caches: list[Any] = []
        self.inner = self._made(folder, dtype)

    def _made(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        model = load_reference(folder, dtype)
        self.defect(model)
        return model

    def reload(self, folder: Path, dtype: torch.dtype) -> None:
        """Take the folder's weights, then put the defect in again."""
        self.caches = []
        self.inner = self._made(folder, dtype)


class SourceStack(StackAdapter):
    """Speaks to source models as if they were ports. Rows of one length run as a batch, ragged rows one by one."""

    name = "source"
    ragged_rows = False

    def __init__(self, defect: Defect) -> None:
        self.defect = defect

    def check_environment(self, *, compiled: bool = False) -> StackStatus:
        """transformers itself, on the CPU."""
        import transformers

        return StackStatus("source", Tier.STAND_IN, "transformers", transformers.__version__, "the corpus of bugs")

    def init_distributed(self, tp_degree: int = 1) -> None:
        """One rank."""
        if tp_degree != 1:
            raise NotOffered("the corpus runs at tp_degree 1")

    def create_model(
        self,
        target_module_file: str | Path,
        target_class_name: str,
        target_config_name: str,
        hf_model_path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch_size: int = 1,
        seq_len: int = 64,
        tp_degree: int = 1,
        **kw: Any,
    ) -> nn.Module:
        """The source model of the folder with the defect in it."""
        return SourcePort(Path(hf_model_path), dtype, batch_size, seq_len, self.defect).eval()

    def load_weights(self, model: nn.Module, hf_model_path: str | Path, dtype: torch.dtype) -> LoadReport:
        """The folder's weights, then the defect."""
        assert isinstance(model, SourcePort)
        model.reload(Path(hf_model_path), dtype)
        return LoadReport(loaded=tuple(model.inner.state_dict()))

    def forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        """Prefill into fresh caches, or one decode step on those that are there."""
        assert isinstance(model, SourcePort)
        with torch.no_grad(), quiet_transformers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if positions is None:
                rows = [int(n) for n in lengths] if lengths is not None else [input_ids.shape[1]] * len(input_ids)
                return self._prefill(model, input_ids, rows)
            return self._decode(model, input_ids)

    def _prefill(self, model: SourcePort, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        groups = (
            [ids[:, : lengths[0]]]
            if len(set(lengths)) == 1
            else [r[None, :n] for r, n in zip(ids, lengths, strict=True)]
        )
        out = [model.inner(input_ids=group, use_cache=True) for group in groups]
        model.caches = [item.past_key_values for item in out]
        return torch.cat([item.logits[:, -1] for item in out]).float()

    def _decode(self, model: SourcePort, ids: Tensor) -> Tensor:
        groups = [ids] if len(model.caches) == 1 else [row[None] for row in ids]
        out = [
            model.inner(input_ids=group, past_key_values=cache, use_cache=True)
            for group, cache in zip(groups, model.caches, strict=True)
        ]
        model.caches = [item.past_key_values for item in out]
        return torch.cat([item.logits[:, -1] for item in out]).float()

    def device_inference(
        self, model_id: str, tp_size: int, prompts: Sequence[Sequence[int]], max_tokens: int = 32, **kw: Any
    ) -> list[Generation]:
        """Not offered: the corpus compares logits."""
        raise NotOffered("the corpus has no compiled models")

    def inner_model(self, model: nn.Module) -> nn.Module:
        """The source model."""
        assert isinstance(model, SourcePort)
        return model.inner

    def limits(self, model: nn.Module) -> ModelLimits:
        """As it was made."""
        assert isinstance(model, SourcePort)
        return ModelLimits(model.batch_size, model.seq_len)
