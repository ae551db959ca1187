"""The parallel layers, under their public path."""

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers._embedding import ParallelEmbedding
from neuronx_distributed.parallel_layers._linear import BaseParallelLinear, ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers._parameter import BaseParallelLayer, SPMDRank

__all__ = [
    "BaseParallelLayer",
    "BaseParallelLinear",
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SPMDRank",
]
__getattr__ = attribute_hook(__name__)
