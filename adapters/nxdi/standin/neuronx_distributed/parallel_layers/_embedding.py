"""The embedding, cut by vocabulary or by hidden features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers._parameter import (
    BaseParallelLayer,
    SPMDRank,
    group_or_default,
    sharded_parameter,
)
from neuronx_distributed.parallel_layers.utils import EmbeddingUtility, divide, get_padding_length


class ParallelEmbedding(BaseParallelLayer):
    """ids [...] -> [..., embedding_dim]. The padding row is an ordinary row: it is neither zeroed nor kept at zero."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[Any], Any] = nn.init.normal_,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        use_spmd_rank: bool = False,
        sequence_dimension: int | None = None,
        tile_cc: bool = False,
        rank_ordering: Sequence[int] | None = None,
        collect_output: bool = True,
    ) -> None:
        super().__init__(device=device)
        self.tensor_model_parallel_group = group_or_default(tensor_model_parallel_group)
        ranks = self.tensor_model_parallel_size = self.tensor_model_parallel_group.size()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.dtype, self.init_method, self.stride = dtype, init_method, 1
        self.shard_across_embedding, self.pad = shard_across_embedding, pad
        self.sequence_parallel_enabled, self.sequence_dim = sequence_parallel_enabled, sequence_dimension
        self.collect_output, self.rank_ordering, self.tile_cc = collect_output, rank_ordering, tile_cc
        self.rank_util = SPMDRank(ranks) if use_spmd_rank else None
        self.weight_partition_dim = 1 if shard_across_embedding else 0
        if pad:
            self.pad_size = get_padding_length(embedding_dim if shard_across_embedding else num_embeddings, ranks)
            if shard_across_embedding:
                self.embedding_dim += self.pad_size
            else:
                self.num_embeddings += self.pad_size
        if shard_across_embedding:
            self.num_embeddings_per_partition = self.num_embeddings
            self.embedding_dim_per_partition = divide(self.embedding_dim, ranks)
            self.padding_idx = padding_idx or None  # entry 0 counts as none
        else:
            self.start_index, self.end_index = EmbeddingUtility.range_from_global_vocab_size(
                self.num_embeddings, self.tensor_model_parallel_group.rank(), ranks
            )
            self.num_embeddings_per_partition = self.end_index - self.start_index
            self.embedding_dim_per_partition = self.embedding_dim
            held = bool(padding_idx) and self.start_index <= (padding_idx or 0) < self.end_index
            self.padding_idx = (padding_idx or 0) - self.start_index if held else None
        self.weight = sharded_parameter(
            (self.num_embeddings_per_partition, self.embedding_dim_per_partition),
            dim=self.weight_partition_dim,
            stride=1,
            group=self.tensor_model_parallel_group,
            dtype=dtype,
            device=device,
            init=init_method,
            rank_ordering=rank_ordering,
        )

    def _look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(
            ids.long(),
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def _by_vocabulary(self, ids: Tensor) -> Tensor:
        if self.tensor_model_parallel_size == 1:
            rows = self._look_up(ids)
        else:
            first: Any = self.start_index
            if self.rank_util is not None:
                first = self.num_embeddings_per_partition * self.rank_util.get_rank()
            held = (ids >= first) & (ids < first + self.num_embeddings_per_partition)
            rows = self._look_up((ids - first) * held.long())
            rows = rows * held.unsqueeze(-1).to(rows.dtype)
        if not self.collect_output:
            return rows
        if self.sequence_parallel_enabled:
            if self.sequence_dim:
                return rows
            return mappings.reduce_scatter_to_sequence_parallel_region(
                rows.transpose(0, 1).contiguous(), process_group=self.tensor_model_parallel_group
            )
        return mappings.reduce_from_tensor_model_parallel_region(rows, self.tensor_model_parallel_group)

    def forward(self, input_: Tensor) -> Tensor:
        """Raises RuntimeError in training mode with `pad`."""
        if self.pad and self.training:
            raise RuntimeError("`pad=True` is only supported for inference: call eval() on the model first")
        if not self.shard_across_embedding:
            return self._by_vocabulary(input_)
        output = self._look_up(input_)
        if self.collect_output:
            output = mappings.gather_from_tensor_model_parallel_region(output, self.tensor_model_parallel_group)
        if self.pad and self.pad_size > 0:
            output = output.narrow(-1, 0, self.embedding_dim - self.pad_size)
        return output

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the checkpoint's table by zeros along the cut dimension.

        Raises:
            RuntimeError: the table is not of the unpadded size.
        """
        if not self.pad or self.pad_size == 0:
            return
        whole = self.embedding_dim if self.shard_across_embedding else self.num_embeddings
        size = model_state_dict[prefix].shape[self.weight_partition_dim]
        if size + self.pad_size != whole:
            raise RuntimeError(f"{prefix} has {size} entries in the checkpoint, expected {whole - self.pad_size}")
        widths = (0, self.pad_size) if self.shard_across_embedding else (0, 0, 0, self.pad_size)
        model_state_dict[prefix] = F.pad(model_state_dict[prefix], widths)
