"""The projections of grouped-query attention, and how a checkpoint's heads are replicated, padded and renamed."""

from __future__ import annotations

import enum
import logging
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse, refuse_overrides
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads
from torch import Tensor, nn
from torch.distributed import ProcessGroup

__getattr__ = attribute_hook(__name__)
logger = logging.getLogger("Neuron")


class GQA(enum.Enum):
    """How key/value heads reach every rank: one per rank, or one per query head."""

    CONVERT_TO_MHA = "convert-to-mha"
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"


def determine_sharding_strategy(
    tp_degree: int, source_key_value_heads: int, desired_sharding_strategy: GQA | None = None
) -> GQA:
    """The desired strategy (one head per rank by default), unless the ranks are no multiple of the heads."""
    strategy = desired_sharding_strategy or GQA.REPLICATE_TO_TP_DEGREE
    if strategy is GQA.REPLICATE_TO_TP_DEGREE and tp_degree % source_key_value_heads:
        logger.warning(
            f"{source_key_value_heads} key/value heads do not divide the TP degree {tp_degree}: GQA.CONVERT_TO_MHA"
        )
        return GQA.CONVERT_TO_MHA
    return strategy


def get_shardable_head_counts(
    tp_degree: int, num_attention_heads: int, num_key_value_heads: int, sharding_strategy: GQA
) -> tuple[int, int]:
    """(query heads, key/value heads) after padding and replication. Neither is fewer than given."""
    queries = num_attention_heads + get_number_of_extra_heads(num_attention_heads, tp_degree)
    if num_attention_heads == num_key_value_heads:
        return queries, queries
    if num_key_value_heads >= tp_degree and num_key_value_heads % tp_degree == 0:
        return queries, num_key_value_heads
    if sharding_strategy is GQA.CONVERT_TO_MHA:
        return queries, queries
    assert tp_degree % num_key_value_heads == 0, "the TP degree must be a multiple of the key/value heads"
    return queries, tp_degree


def _by_head(tensor: Tensor, heads: int, dim: int) -> Tensor:
    return tensor.unflatten(dim, (heads, tensor.shape[dim] // heads))


def _repeat_heads(tensor: Tensor | None, heads: int, repeats: int) -> Tensor | None:
    """Each head of dimension 0 `repeats` times in a row."""
    if tensor is None:
        return None
    return _by_head(tensor, heads, 0).repeat_interleave(repeats, dim=0).flatten(0, 1)


def _pad_heads(tensor: Tensor | None, heads: int, target: int, dim: int, group: int | None = None) -> Tensor | None:
    """Zero heads up to `target`: at the end, or (with `group`) the same number after each `group` heads."""
    if tensor is None or target == heads:
        return tensor
    split = _by_head(tensor, heads, dim)
    group = heads if group is None else group
    extra = (target - heads) // (heads // group)
    out = []
    for piece in split.split(group, dim=dim):
        shape = list(piece.shape)
        shape[dim] = extra
        out += [piece, piece.new_zeros(shape)]
    return torch.cat(out, dim=dim).flatten(dim, dim + 1)


def _enclosing(prefix: str) -> tuple[str, str]:
    """The layer that `prefix` is a weight of, and the module around it."""
    parts = prefix.split(".")
    return ".".join(parts[:-1]), ".".join(parts[:-2])


class BaseGroupQueryAttention(nn.Module):
    """Head counts after sharding, and the renaming of checkpoint keys."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        group = tensor_model_parallel_group
        if group is None and parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_tensor_model_parallel_group()
        if tensor_model_parallel_group is not None:
            tp_degree = tensor_model_parallel_group.size() if tp_degree == 1 else tp_degree
            assert tp_degree == tensor_model_parallel_group.size(), (
                f"TP degree {tp_degree} differs from the group's size {tensor_model_parallel_group.size()}"
            )
        self.tensor_model_parallel_group = group
        self.hidden_size, self.head_dim, self.tp_degree = hidden_size, head_dim, tp_degree
        self.dtype, self.bias = dtype, bias
        self._src_num_attention_heads, self._src_num_key_value_heads = num_attention_heads, num_key_value_heads
        self.sharding_strategy = determine_sharding_strategy(tp_degree, num_key_value_heads, desired_sharding_strategy)
        self.num_attention_heads, self.num_key_value_heads = get_shardable_head_counts(
            tp_degree, num_attention_heads, num_key_value_heads, self.sharding_strategy
        )

    def get_sharding_strategy(self) -> GQA:
        """How key/value heads are spread."""
        return self.sharding_strategy

    def get_num_attention_heads(self) -> int:
        """Query heads over all ranks."""
        return self.num_attention_heads

    def get_num_key_value_heads(self) -> int:
        """Key/value heads over all ranks."""
        return self.num_key_value_heads

    def replace_prefixes(self, old_prefix: str, new_prefix: str, model_state_dict: dict[str, Any]) -> None:
        """Add every key that contains `old_prefix` under its new name too; the old key stays."""
        renamed = {
            key.replace(old_prefix, new_prefix): value for key, value in model_state_dict.items() if old_prefix in key
        }
        model_state_dict.update(renamed)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> bool:
        """Rearrange the checkpoint for this layer, whose own weight would be `prefix`."""
        raise NotImplementedError

    def _pad_queries(self, tensor: Tensor | None, dim: int) -> Tensor | None:
        interleaved = self.sharding_strategy is GQA.REPLICATE_TO_TP_DEGREE
        group = self._src_num_attention_heads // self._src_num_key_value_heads if interleaved else None
        return _pad_heads(tensor, self._src_num_attention_heads, self.num_attention_heads, dim, group)

    def _spread_kv(self, tensor: Tensor | None) -> Tensor | None:
        heads, target = self._src_num_key_value_heads, self.num_key_value_heads
        as_mha = self.sharding_strategy is GQA.CONVERT_TO_MHA
        if target != heads:
            tensor = _repeat_heads(
                tensor, heads, (self._src_num_attention_heads if as_mha else self.tp_degree) // heads
            )
        # After replication to MHA the padding still counts from the source's heads and overshoots, as on the real
        # stack: loading then fails on the shape.
        return _pad_heads(tensor, heads, target, 0) if as_mha else tensor


class GroupQueryAttention_QKV(BaseGroupQueryAttention):
    """hidden [B, S, hidden] -> query, key, value [B, S, heads * head_dim / ranks], and the residual as given."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        gather_output: bool = True,
        fused_qkv: bool = False,
        clip_qkv: float | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        rms_norm_eps: float | None = 1e-6,
        qkv_kernel_enabled: bool = False,
        qkv_nki_kernel_enabled: bool = False,
        fused_rmsnorm_skip_gamma: bool = False,
        tiling_factor: int = 1,
        seq_len_threshold_for_cc_tiling: int = 16834,
        logical_nc_config: int = 1,
        qkv_kernel_nbsd_layout: bool = False,
        on_cpu: bool = False,
        rank_ordering: Any = None,
    ) -> None:
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        refuse_overrides(self, GroupQueryAttention_QKV, "_native_qkv_forward", "_split_fused_qkv")
        for flag, value in (
            ("sequence_parallel_enabled", sequence_parallel_enabled),
            ("qkv_kernel_enabled", qkv_kernel_enabled),
            ("qkv_nki_kernel_enabled", qkv_nki_kernel_enabled),
        ):
            if value:
                refuse(f"{flag}=True")
        if fused_qkv and gather_output:
            raise ValueError("a fused projection cannot gather its output: its pieces are cut by themselves")
        self.gather_output, self.fused_qkv, self.clip_qkv = gather_output, fused_qkv, clip_qkv
        self.rms_norm_eps, self.rank_ordering = rms_norm_eps, rank_ordering
        queries, keys = self.num_attention_heads * head_dim, self.num_key_value_heads * head_dim
        if fused_qkv:
            self.Wqkv = self._projection(queries + 2 * keys)
            if self.tensor_model_parallel_group is not None:
                self._mark_fused(self.Wqkv.weight)
                if bias:
                    self._mark_fused(self.Wqkv.bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = map(self._projection, (queries, keys, keys))

    def _projection(self, features: int) -> nn.Module:
        if self.tensor_model_parallel_group is None:
            return nn.Linear(self.hidden_size, features, bias=self.bias)
        return ColumnParallelLinear(
            self.hidden_size,
            features,
            bias=self.bias,
            gather_output=self.gather_output,
            dtype=self.dtype,
            tensor_model_parallel_group=self.tensor_model_parallel_group,
            rank_ordering=self.rank_ordering,
        )

    def _mark_fused(self, param: Any) -> None:
        param.fused_qkv, param.head_dim = True, self.head_dim
        param.num_attention_heads, param.num_key_value_heads = self.num_attention_heads, self.num_key_value_heads

    def forward(
        self,
        hidden_states: Tensor,
        rmsnorm: Any = None,
        adapter_ids: Any = None,
        residual: Any = None,
        cos_cache: Any = None,
        sin_cache: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """`rmsnorm` is for a fused kernel: here it is not applied."""
        if self.fused_qkv:
            fused = self.Wqkv(hidden_states)
            queries = self.num_attention_heads * self.head_dim // self.tp_degree
            keys = self.num_key_value_heads * self.head_dim // self.tp_degree
            parts = fused.tensor_split((queries, queries + keys), dim=2)
        else:
            parts = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        if self.clip_qkv is not None:
            parts = tuple(part.clamp(-self.clip_qkv, self.clip_qkv) for part in parts)
        return parts[0], parts[1], parts[2], residual

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> bool:
        """Move `<attention>.{q,k,v}_proj` (or Wqkv) to this layer's names; replicate and pad heads.

        Raises:
            KeyError: a weight is absent.
            AttributeError: the layer has a bias and the checkpoint has none.
        """
        own, outer = _enclosing(prefix)
        names = ["Wqkv"] if self.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        for name in names:
            self.replace_prefixes(f"{outer}.{name}", f"{own}.{name}", model_state_dict)
        weights: list[Tensor | None] = [model_state_dict[f"{own}.{name}.weight"] for name in names]
        biases: list[Tensor | None] = [model_state_dict.get(f"{own}.{name}.bias") for name in names]
        if self.fused_qkv:
            weights, biases = self._unfuse(weights[0]), self._unfuse(biases[0])
        for parts in (weights, biases):
            parts[:] = [self._pad_queries(parts[0], 0), self._spread_kv(parts[1]), self._spread_kv(parts[2])]
        if self.fused_qkv:
            weights = [torch.cat([part for part in weights if part is not None], dim=0)]
            biases = [torch.cat(biases, dim=0)] if self.bias else []  # type: ignore[arg-type]
            self._mark_fused(self.Wqkv.weight)
        for name, weight in zip(names, weights, strict=True):
            model_state_dict[f"{own}.{name}.weight"] = weight
        if self.bias:
            for name, bias in zip(names, biases, strict=True):
                model_state_dict[f"{own}.{name}.bias"] = bias.clone()  # type: ignore[union-attr]
        return True

    def _unfuse(self, tensor: Tensor | None) -> list[Tensor | None]:
        if tensor is None:
            return [None, None, None]
        queries = self._src_num_attention_heads * self.head_dim
        keys = self._src_num_key_value_heads * self.head_dim
        return list(tensor.split([queries, keys, keys], dim=0))


class GroupQueryAttention_O(BaseGroupQueryAttention):
    """attention [B, S, heads * head_dim / ranks] -> hidden [B, S, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        tp_degree: int = 1,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        desired_sharding_strategy: GQA | None = None,
        input_is_parallel: bool = False,
        layer_name: str = "o_proj",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        rpl_reduce_dtype: torch.dtype | None = None,
        out_proj_kernel_enabled: bool = False,
        logical_nc_config: int = 1,
        rank_ordering: Any = None,
        tiling_factor: int = 1,
    ) -> None:
        super().__init__(
            hidden_size,
            head_dim,
            num_attention_heads,
            num_key_value_heads,
            tp_degree,
            dtype,
            bias,
            desired_sharding_strategy,
            tensor_model_parallel_group,
        )
        if sequence_parallel_enabled or out_proj_kernel_enabled:
            refuse(f"{sequence_parallel_enabled=}, {out_proj_kernel_enabled=}")
        self.input_is_parallel, self.layer_name = input_is_parallel, layer_name
        self.rpl_reduce_dtype, self.rank_ordering = rpl_reduce_dtype, rank_ordering
        features = self.num_attention_heads * head_dim
        if self.tensor_model_parallel_group is None:
            self.o_proj: nn.Module = nn.Linear(features, hidden_size, bias=bias)
        else:
            self.o_proj = RowParallelLinear(
                features,
                hidden_size,
                bias=bias,
                input_is_parallel=input_is_parallel,
                dtype=dtype,
                tensor_model_parallel_group=self.tensor_model_parallel_group,
                reduce_dtype=rpl_reduce_dtype,  # type: ignore[arg-type]
                rank_ordering=rank_ordering,
            )

    def forward(self, attention_output: Tensor, adapter_ids: Any = None) -> Tensor:
        """Project."""
        return self.o_proj(attention_output)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> bool:
        """Move `<attention>.<layer_name>` to this layer's names; pad heads.

        Raises:
            KeyError: the weight is absent.
            AttributeError: the layer has a bias and the checkpoint has none.
        """
        own, outer = _enclosing(prefix)
        self.replace_prefixes(f"{outer}.{self.layer_name}", f"{own}.o_proj", model_state_dict)
        key = f"{own}.o_proj"
        model_state_dict[f"{key}.weight"] = self._pad_queries(model_state_dict[f"{key}.weight"], 1)
        if self.bias:
            model_state_dict[f"{key}.bias"] = model_state_dict.get(f"{key}.bias").clone()  # type: ignore[union-attr]
        return True
