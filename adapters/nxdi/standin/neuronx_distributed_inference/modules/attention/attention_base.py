"""The attention block that ports subclass, under its public path."""

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers.mappings import gather_from_tensor_model_parallel_region_with_dim

from neuronx_distributed_inference.modules.attention._block import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention._kinds import (
    EPDispatchOption,
    FlashAttentionStrategy,
    NeuronAttentionBaseOutput,
    QKNormPlacement,
)
from neuronx_distributed_inference.modules.attention.attention_process_groups import (
    get_context_parallel_attention_cp_group,
    get_data_parallel_attention_dp_group,
)
from neuronx_distributed_inference.modules.attention.gqa import GQA, GroupQueryAttention_O, GroupQueryAttention_QKV
from neuronx_distributed_inference.modules.attention.utils import (
    apply_rotary_pos_emb,
    get_last_kv_chunk,
    get_last_kv_window,
    manual_softmax,
    move_heads_front,
    repeat_kv,
)
from neuronx_distributed_inference.utils.distributed import get_dp_rank, split_along_dim

__all__ = [
    "GQA",
    "EPDispatchOption",
    "FlashAttentionStrategy",
    "GroupQueryAttention_O",
    "GroupQueryAttention_QKV",
    "NeuronAttentionBase",
    "NeuronAttentionBaseOutput",
    "QKNormPlacement",
    "apply_rotary_pos_emb",
    "gather_from_tensor_model_parallel_region_with_dim",
    "get_context_parallel_attention_cp_group",
    "get_data_parallel_attention_dp_group",
    "get_dp_rank",
    "get_last_kv_chunk",
    "get_last_kv_window",
    "manual_softmax",
    "move_heads_front",
    "repeat_kv",
    "split_along_dim",
]
__getattr__ = attribute_hook(__name__)
