"""The served causal language model: two stages, prefill and decode, behind one `forward`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from neuronx_distributed._standin.missing import refuse_overrides
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
)
from neuronx_distributed_inference.modules import autobucketing
from neuronx_distributed_inference.modules.generation.sampling import (
    infer_sampling_params,
    prepare_sampling_params,
    validate_sampling_params,
)


class NeuronBaseForCausalLM(NeuronApplicationBase):
    """Ports set `_model_cls` and the hooks of the application."""

    _model_cls: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_overrides(self, NeuronBaseForCausalLM, "_construct_output_with_tokens_and_logits")
        served = self.neuron_config
        self.text_config = self.config.get_text_config()
        self.vocab_size = self.text_config.vocab_size
        self.padding_side = served.padding_side
        self.kv_cache_populated = self.async_mode = self.async_should_stop = False
        self.prior_seq_ids: Tensor | None = None
        self.unequal_batching = served.ctx_batch_size != served.tkg_batch_size
        self.sampler = None
        self.default_sampling_params = prepare_sampling_params(
            batch_size=served.batch_size, top_k=[1], top_p=[1.0], temperature=[1.0]
        )
        self.model_wrapper = self.get_model_wrapper_cls()
        self.enable_context_encoding()
        self.enable_token_generation()
        for model in self.models:
            assert model.neuron_config.is_prefill_stage is not None, f"{model.tag} does not tell its stage"

    def get_model_wrapper_cls(self) -> Any:
        """Hook: the class of the stages."""
        return ModelWrapper

    def _stage_config(self, **flags: Any) -> InferenceConfig:
        config = copy.deepcopy(self.config)
        vars(config.neuron_config).update(flags)
        return config

    def enable_context_encoding(self, **model_init_kwargs: Any) -> None:
        """Add the prefill stage."""
        config = self._stage_config(
            batch_size=self.neuron_config.ctx_batch_size,
            n_active_tokens=self.neuron_config.max_context_length,
            bucket_n_active_tokens=True,
            is_prefill_stage=True,
        )
        config.neuron_config.buckets = autobucketing.generate_buckets_for_cte(config)
        self.context_encoding_model = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=CONTEXT_ENCODING_MODEL_TAG,
            compiler_args=self.get_compiler_args(),
            model_init_kwargs=model_init_kwargs,
        )
        self.models.append(self.context_encoding_model)

    def enable_token_generation(self, enable_wlt_optimization: bool = True, **model_init_kwargs: Any) -> None:
        """Add the decode stage."""
        config = self._stage_config(
            batch_size=self.neuron_config.tkg_batch_size,
            n_active_tokens=1,
            bucket_n_active_tokens=False,
            is_prefill_stage=False,
        )
        config.neuron_config.buckets = autobucketing.generate_buckets_for_tkg(config)
        self.token_generation_model = self.model_wrapper(
            config=config,
            model_cls=self._model_cls,
            tag=TOKEN_GENERATION_MODEL_TAG,
            compiler_args=self.get_compiler_args(),
            priority_model_idx=0 if enable_wlt_optimization else None,
            model_init_kwargs=model_init_kwargs,
        )
        self.models.append(self.token_generation_model)

    def get_generation_model(self) -> Any:
        """The decode stage."""
        return self.token_generation_model

    def preprocess_inputs(
        self,
        input_ids: Any = None,
        seq_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        sampling_params: Any = None,
        prev_hidden: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        adapter_ids: Any = None,
        medusa_args: Any = None,
        return_dict: Any = None,
        llava_args: Any = (),
        input_capture_hook: Any = None,
        tensor_capture_hook: Any = None,
        slot_mapping: Any = None,
        block_table: Any = None,
        full_context_lens: Any = None,
        computed_context_lens: Any = None,
        rotary_position_ids: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(ids, mask, positions, sequence ids, sampling parameters), the absent ones filled in.

        Raises:
            AssertionError: neither a mask nor positions.
            AttributeError: the configuration lacks output_attentions or output_hidden_states.
        """
        if attention_mask is None:
            attention_mask = self._infer_attention_mask(position_ids)
        if seq_ids is None:
            seq_ids = torch.arange(input_ids.shape[0])
        sampling_params = self.default_sampling_params if sampling_params is None else sampling_params
        self.validate_sampling_params(sampling_params)
        self.sampling_params = infer_sampling_params(sampling_params)
        self._setup_func_config(output_attentions, output_hidden_states, return_dict)
        if input_capture_hook is not None:
            if not self.kv_cache_populated:
                self.initial_input_size = len(input_ids[0])
            input_capture_hook(self, [input_ids, attention_mask, position_ids, seq_ids, self.sampling_params])
        if self.prior_seq_ids is None:
            self.prior_seq_ids = seq_ids
        return input_ids, attention_mask, position_ids, seq_ids, self.sampling_params

    def forward(
        self,
        input_ids: Any = None,
        seq_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        sampling_params: Any = None,
        prev_hidden: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        adapter_ids: Any = None,
        medusa_args: Any = None,
        return_dict: Any = None,
        llava_args: Any = (),
        input_capture_hook: Any = None,
        tensor_capture_hook: Any = None,
        slot_mapping: Any = None,
        block_table: Any = None,
        full_context_lens: Any = None,
        computed_context_lens: Any = None,
        tf_args: Any = None,
    ) -> CausalLMOutputWithPast:
        """`logits` [B, 1, V] of the next token (None when sampling is on: then `tokens`).

        Positions that hold a 0 anywhere make the call a prefill, others a decode step.
        """
        if input_ids.shape[-1] > 1:
            # As on the real stack: a prompt needs its positions, even beside a mask.
            self._is_prefill(position_ids)
        ids, mask, positions, rows, sampling = self.preprocess_inputs(
            input_ids=input_ids,
            seq_ids=seq_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            sampling_params=sampling_params,
            prev_hidden=prev_hidden,
            labels=labels,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            adapter_ids=adapter_ids,
            medusa_args=medusa_args,
            return_dict=return_dict,
            llava_args=llava_args,
            input_capture_hook=input_capture_hook,
            tensor_capture_hook=tensor_capture_hook,
            slot_mapping=slot_mapping,
            block_table=block_table,
            full_context_lens=full_context_lens,
            computed_context_lens=computed_context_lens,
        )
        outputs, on_device = self._get_model_outputs(
            ids, mask, positions, rows, sampling, prev_hidden, adapter_ids, medusa_args, llava_args
        )
        if not self.get_generation_model().is_neuron():
            self._copy_past_key_values(outputs)
        return self._get_constructed_outputs(outputs, on_device)

    def validate_sampling_params(self, params: Tensor) -> None:
        """Raises ValueError for bad ones, when sampling is on."""
        if self.on_device_sampling:
            validate_sampling_params(params, self.neuron_config.on_device_sampling_config)

    def _setup_func_config(self, output_attentions: Any, output_hidden_states: Any, return_dict: Any) -> Any:
        attentions = self.text_config.output_attentions if output_attentions is None else output_attentions
        hidden = self.text_config.output_hidden_states if output_hidden_states is None else output_hidden_states
        as_dict = getattr(self.config, "use_return_dict", None) if return_dict is None else return_dict
        return attentions, hidden, as_dict

    def _infer_attention_mask(
        self, position_ids: Any, full_context_lens: Any = None, computed_context_lens: Any = None
    ) -> Tensor:
        """Prefill: where the position is at least its column. Decode: strictly earlier columns, up to the longest."""
        assert position_ids is not None, "need to call forward with position_ids if attention_mask is not provided"
        decode = position_ids.shape[-1] == 1
        columns = int(position_ids.max()) if decode else position_ids.shape[-1]
        reached = position_ids - 1 if decode else position_ids
        return (reached >= torch.arange(columns)[None, :]).to(position_ids.dtype)

    def _is_prefill(self, position_ids: Tensor) -> bool:
        return position_ids.min().item() == 0

    def _get_model_outputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
        prev_hidden: Any,
        adapter_ids: Any,
        medusa_args: Any,
        llava_args: Any,
        slot_mapping: Any = None,
        block_table: Any = None,
        full_context_lens: Any = None,
        computed_context_lens: Any = None,
        tf_args: Any = None,
    ) -> tuple[Any, bool]:
        prefill = self._is_prefill(position_ids)
        stage = self.context_encoding_model if prefill else self.token_generation_model
        outputs = stage(
            input_ids, attention_mask, position_ids, seq_ids, sampling_params, prev_hidden, adapter_ids, *llava_args
        )
        if prefill:
            self.kv_cache_populated = True
        return outputs, stage.is_neuron()

    def _copy_past_key_values(self, outputs: Any) -> None:
        """Give both stages the updated cache."""
        first = 2 if self.neuron_config.output_logits and self.neuron_config.on_device_sampling_config else 1
        for idx, value in enumerate(outputs[first:]):
            for stage in (self.token_generation_model, self.context_encoding_model):
                stage.model.kv_mgr.past_key_values[idx].data = value

    def _get_constructed_outputs(self, outputs: Any, is_run_on_neuron: bool) -> Any:
        if self.on_device_sampling and self.neuron_config.output_logits:
            result: Any = CausalLMOutputWithPast(logits=outputs[1], hidden_states=(), attentions=None)
            result.tokens = outputs[0]
            result.captured_tensors = None
            return result
        return self._construct_output(outputs if is_run_on_neuron else outputs[0])

    def _construct_output(self, logits_or_next_tokens: Any) -> Any:
        logits = None if self.on_device_sampling else logits_or_next_tokens
        result: Any = CausalLMOutputWithPast(logits=logits, hidden_states=logits_or_next_tokens, attentions=None)
        result.tokens = logits_or_next_tokens
        result.captured_tensors = None
        return result

    def reset(self) -> None:
        """The next call is a new batch."""
        self.kv_cache_populated = False

    def get_required_kwargs(self) -> list[str]:
        """Hook: keywords that `forward` cannot do without."""
        return []
