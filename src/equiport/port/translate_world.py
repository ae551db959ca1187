"""What a unit's test stands on: the stack on the import path, a tiny config of the source, inputs for its blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from equiport.stacks.loading import load_adapter

_BATCH, _LENGTH = 2, 24


class UnitWorld:
    """One source config, small enough to run anywhere, and inputs [2, 24, ...] drawn from a seed."""

    def __init__(self, stack: str, config: Mapping[str, Any], seed: int = 42) -> None:
        """Bring the stack up (its packages import from here on) and build the source's config."""
        from transformers import AutoConfig

        torch.set_num_threads(1)
        load_adapter(stack).init_distributed()
        values = dict(config)
        self.hf_config: Any = AutoConfig.for_model(values.pop("model_type"), **values)
        self.hf_config._attn_implementation = "eager"
        self._seed = seed

    def port_config(self, config_class: Any) -> Any:
        """The port's config for this source config."""
        from neuronx_distributed_inference.models.config import NeuronConfig
        from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

        served = NeuronConfig(
            tp_degree=1, batch_size=_BATCH, seq_len=_LENGTH, max_context_length=_LENGTH, torch_dtype=torch.float32,
            on_cpu=True, padding_side="right",
        )  # fmt: skip
        return config_class(served, load_config=load_pretrained_config(hf_config=self.hf_config))

    def hidden(self, width: int | None = None) -> Tensor:
        """[2, 24, hidden_size], standard normal, exact in bfloat16."""
        generator = torch.Generator().manual_seed(self._seed)
        drawn = torch.randn(_BATCH, _LENGTH, width or self.hf_config.hidden_size, generator=generator)
        return drawn.to(torch.bfloat16).float()

    def tokens(self) -> Tensor:
        """[2, 24] token ids."""
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randint(1, self.hf_config.vocab_size, (_BATCH, _LENGTH), generator=generator)

    def source_module(self, path: str) -> nn.Module:
        """A module of the source model as the source itself builds it, with weights of its own."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.hf_config, attn_implementation="eager").float()
        module: nn.Module = model.get_submodule(path)
        return module

    def positions(self) -> Tensor:
        """[2, 24] int64, counted from 0."""
        return torch.arange(_LENGTH).expand(_BATCH, _LENGTH)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, as the source's config has it."""
        kinds = getattr(self.hf_config, "layer_types", None)
        window = getattr(self.hf_config, "sliding_window", None)
        if kinds is not None:
            return window if kinds[layer] == "sliding_attention" else None
        return window if getattr(self.hf_config, "use_sliding_window", True) else None

    def mask(self, window: int | None = None) -> Tensor:
        """[2, 1, 24, 24] bool, True where a key is seen."""
        query, key = torch.arange(_LENGTH)[:, None], torch.arange(_LENGTH)[None]
        seen = (key <= query) & (key > query - (window or _LENGTH))
        return seen.expand(_BATCH, 1, -1, -1)

    def attention_inputs(self, window: int | None = None) -> dict[str, Any]:
        """Keywords of the port's attention, in prefill. `window`: where the model's mask already has it."""
        return {"hidden_states": self.hidden(), "attention_mask": self.mask(window), "position_ids": self.positions()}

    def rotary_inputs(self, rotary: nn.Module, layer: int, hidden: Tensor | None = None) -> tuple[Any, ...]:
        """Arguments of a source's rotary module: hidden states, positions, and the layer's type where it takes one."""
        given = (self.hidden() if hidden is None else hidden, self.positions())
        if "layer_type" not in inspect.signature(rotary.forward).parameters:
            return given
        return (*given, self.hf_config.layer_types[layer])

    def reference_attention_inputs(self, rotary: nn.Module, layer: int) -> Callable[[torch.dtype], dict[str, Any]]:
        """Keywords of the source's attention for the same call, by dtype."""

        def inputs(dtype: torch.dtype) -> dict[str, Any]:
            hidden = self.hidden().to(dtype)
            hide = torch.finfo(dtype).min * (~self.mask(self.window(layer))).to(dtype)
            tables = rotary(*self.rotary_inputs(rotary, layer, hidden))
            return {"hidden_states": hidden, "attention_mask": hide, "position_embeddings": tables}

        return inputs
