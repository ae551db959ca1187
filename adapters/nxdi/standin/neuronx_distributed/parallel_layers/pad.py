"""Padding of attention heads to the tensor parallel degree."""

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers.utils import get_padding_length

__getattr__ = attribute_hook(__name__)


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """Heads to add so that every rank has the same number."""
    return get_padding_length(n_head, tp_degree)
