"""Mixtures of experts: router, experts, shared experts."""

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.model_utils import ACT2FN
from neuronx_distributed.modules.moe.routing import RouterTopK

__all__ = ["ACT2FN", "ExpertMLPs", "MoE", "RouterTopK"]
__getattr__ = attribute_hook(__name__)
