"""A learned logit per head that takes part in the softmax and gives nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from neuronx_distributed.parallel_layers.utils import divide, set_tensor_model_parallel_attributes
from torch import Tensor, nn

__getattr__ = attribute_hook(__name__)


class LearnedSink(BaseParallelLinear):
    """Parameter `sink` [heads / ranks], zero until a checkpoint sets it."""

    def __init__(
        self,
        learned_sinks_size: int,
        num_attention_heads: int,
        torch_dtype: torch.dtype,
        tensor_model_parallel_size: int | None = None,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        assert learned_sinks_size == 1, f"one sink per head is supported, not {learned_sinks_size}"
        ranks = tensor_model_parallel_size or get_tensor_model_parallel_size()
        self.tensor_model_parallel_size = ranks
        self.sink = nn.Parameter(torch.zeros(divide(num_attention_heads, ranks), dtype=torch_dtype), False)
        set_tensor_model_parallel_attributes(self.sink, True, 0, 1, ranks, rank_ordering)

    def get_sink(self) -> Tensor:
        """The parameter."""
        return self.sink
