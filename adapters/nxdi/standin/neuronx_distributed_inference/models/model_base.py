"""The model bases that ports subclass, under their public path."""

from neuronx_distributed._standin.missing import attribute_hook

from neuronx_distributed_inference.models._base_model import NeuronBaseModel
from neuronx_distributed_inference.models._causal_lm import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)
from neuronx_distributed_inference.modules.generation.sampling import (
    create_sampler,
    infer_sampling_params,
    mask_padded_logits,
    prepare_sampling_params,
    validate_sampling_params,
)
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from neuronx_distributed_inference.utils.distributed import get_tp_group

__all__ = [
    "CONTEXT_ENCODING_MODEL_TAG",
    "TOKEN_GENERATION_MODEL_TAG",
    "KVCacheManager",
    "ModelWrapper",
    "NeuronApplicationBase",
    "NeuronBaseForCausalLM",
    "NeuronBaseModel",
    "create_sampler",
    "get_tp_group",
    "infer_sampling_params",
    "mask_padded_logits",
    "prepare_sampling_params",
    "validate_sampling_params",
]
__getattr__ = attribute_hook(__name__)
