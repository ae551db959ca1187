"""Sampling parameters, masking of a padded vocabulary, and greedy choice."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.parallel_layers import mappings, parallel_state
from torch import Tensor, nn

__getattr__ = attribute_hook(__name__)


def mask_padded_logits(logits: Tensor, rank_id: Tensor, world_size: int, pad_size: int | None = None) -> Tensor:
    """The smallest number in the last `pad_size` columns, when `rank_id` is the last of `world_size` ranks."""
    if not pad_size:
        return logits
    padded = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] - pad_size
    last = (rank_id == world_size - 1).to(logits.device)
    return torch.where(padded & last, torch.finfo(logits.dtype).min, logits)


def _as_tensor(value: Any) -> Tensor:
    if torch.is_tensor(value):
        return value
    return torch.tensor(value if isinstance(value, list) else [value])


def prepare_sampling_params(batch_size: int, top_k: Any = 1, top_p: Any = 1.0, temperature: Any = 1.0) -> Tensor:
    """[batch_size, 3] float32: top_k, top_p and temperature of each row; one value serves all rows."""
    columns = [_as_tensor(value) for value in (top_k, top_p, temperature)]
    assert len({column.shape[0] for column in columns}) == 1, "the sampling parameters differ in length"
    if columns[0].shape[0] == 1:
        columns = [column.expand(batch_size) for column in columns]
    return torch.stack(columns, dim=1)


def validate_sampling_params(params: Tensor, on_device_sampling_config: Any) -> None:
    """Raises ValueError for parameters [batch, 3] outside their ranges."""
    if params.shape[1] != 3:
        raise ValueError(f"Expected tensor of shape (batch_size, 3), but got {params.shape}")
    config = on_device_sampling_config
    limit = config["global_topk"] if isinstance(config, dict) else config.global_topk
    top_k, top_p, temperature = params.float().unbind(1)
    if not bool((((top_k == -1) | ((top_k >= 0) & (top_k <= limit))) & (top_k == top_k.floor())).all()):
        raise ValueError(f"Invalid top-k values found: {top_k}")
    if not bool(((top_p > 0) & (top_p <= 1)).all()):
        raise ValueError(f"Invalid top-p values found: {top_p}")
    if not bool((temperature >= 0).all()) or bool(((temperature == 0) & (top_k <= 0)).any()):
        raise ValueError(f"Invalid temperature values found: {temperature}")


def infer_sampling_params(params: Tensor) -> Tensor:
    """Greedy values (top_k and top_p of 1) in the rows with temperature 0; in place."""
    params[params[:, 2] == 0, :2] = 1
    return params


class Sampler(nn.Module):
    """The token of each row of logits [rows, vocabulary of this rank]: the largest, or one drawn from the best.

    Sampling: the `global_topk` largest (all, for 0), of which a row's top_k and top_p leave some; drawn in the order of
    their size at 0.5 (`deterministic`) or at a uniform number.

    Raises:
        StandInRefused: sampling where the vocabulary is not whole (not on the CPU), or by a kernel.
    """

    IGNORED_LOGITS_VALUE = -3000

    def __init__(self, neuron_config: Any, do_sample: bool | None = None) -> None:
        super().__init__()
        config = neuron_config.on_device_sampling_config
        self.on_device_sampling = config is not None
        assert self.on_device_sampling, "on device configs is not initialized"
        self.neuron_config, self.is_medusa = neuron_config, False
        self.do_sample = config.do_sample if do_sample is None else do_sample
        self.dynamic, self.deterministic, self.global_topk = config.dynamic, config.deterministic, config.global_topk
        self.top_k_kernel_enabled = config.top_k_kernel_enabled
        if (self.do_sample or self.dynamic) and not neuron_config.on_cpu:
            refuse("OnDeviceSamplingConfig(do_sample=True or dynamic=True) without on_cpu=True")

    def forward(
        self, token_logits: Tensor, sampling_params: Any, return_values: bool = False, rank_id: Any = None
    ) -> Any:
        """Token ids [rows]. With `return_values`: sampling gives the kept ids and their probabilities, and the largest
        of a vocabulary that is not on the CPU comes with ones."""
        if self.do_sample or self.dynamic:
            return self._sample(token_logits, *sampling_params.unbind(1), return_values=return_values)
        if self.neuron_config.on_cpu:
            return torch.argmax(token_logits, dim=-1)
        group = parallel_state.get_tensor_model_parallel_group()
        tokens = torch.argmax(mappings._gather_along_last_dim(token_logits, group), dim=-1)
        return (tokens, torch.ones(tokens.shape, dtype=token_logits.dtype)) if return_values else tokens

    def _sample(self, logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor, *, return_values: bool) -> Any:
        top_k, top_p, temperature = (
            value.reshape(-1, *[1] * (logits.dim() - 1)) for value in (top_k, top_p, temperature)
        )
        if self.global_topk > 0:
            kept, ids = torch.topk(logits, self.global_topk, dim=-1)
        else:
            kept, ids = torch.sort(logits, dim=-1, descending=True)
        place = torch.arange(kept.shape[-1], device=kept.device)
        kept = kept.masked_fill(place >= top_k, self.IGNORED_LOGITS_VALUE)
        if self.dynamic or bool((temperature != 1.0).any()):
            kept = kept / temperature
        if self.dynamic or bool((top_p < 1.0).any()):
            summed = torch.cumsum(kept.softmax(-1), dim=-1)
            # At least the first; a limit below the smallest sum of the whole batch is raised to it.
            beyond = (summed > torch.maximum(summed.min(), top_p)) & (place > 0)
            kept = kept.masked_fill(beyond, self.IGNORED_LOGITS_VALUE)
        probabilities = kept.softmax(-1)
        if return_values:
            return ids, probabilities
        summed = torch.cumsum(probabilities, dim=-1)
        summed = summed / summed[..., -1:]
        summed[..., -1:] = 1
        shape = (*summed.shape[:1], *[1] * (summed.dim() - 1))
        drawn = torch.full(shape, 0.5) if self.deterministic else torch.rand(shape, dtype=summed.dtype)
        return torch.gather(ids, -1, (drawn > summed).sum(-1, keepdim=True)).flatten()


def create_sampler(neuron_config: Any, lm_head_tp_degree: int | None = None, do_sample: bool | None = None) -> Sampler:
    """The sampler of a configuration. On a CPU rows are never dealt to ranks, whatever `sampling_dp_degree` says."""
    config = neuron_config.on_device_sampling_config
    if config and config.sampling_dp_degree > 1 and not neuron_config.on_cpu:
        refuse(f"OnDeviceSamplingConfig(sampling_dp_degree={config.sampling_dp_degree})")
    return Sampler(neuron_config, do_sample)
