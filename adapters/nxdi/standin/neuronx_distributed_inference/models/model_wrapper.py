"""One stage (prefill or decode) of a served model: padding of a call to the stage's shape, and the call."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed._standin.missing import attribute_hook, refuse, refuse_overrides
from torch import Tensor, nn

from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.padding import pad_with_first_batchline

__getattr__ = attribute_hook(__name__)

CONTEXT_ENCODING_MODEL_TAG = "context_encoding_model"
TOKEN_GENERATION_MODEL_TAG = "token_generation_model"
SPECULATION_MODEL_TAG = "speculation_model"
MEDUSA_MODEL_TAG = "medusa_speculation_model"
FUSED_SPECULATION_MODEL_TAG = "fused_speculation_model"
VISION_ENCODER_MODEL_TAG = "vision_encoder_model"

_SEQ_IDS, _SAMPLING, _HIDDEN, _ADAPTER = 3, 4, 5, 6


class ModelWrapper(nn.Module):
    """Calls `model` with (input_ids, attention_mask, position_ids, seq_ids, sampling_params, two placeholders, ...).

    Prompts are padded to the stage's length: ids by the pad token, masks by 0, positions by 1. Token ids and positions
    arrive as int32. A batch that is not the stage's is run in pieces, or padded and reordered by `seq_ids`.
    """

    def __init__(
        self,
        config: InferenceConfig,
        model_cls: Any,
        tag: str = "",
        compiler_args: str | None = None,
        priority_model_idx: int | None = None,
        pipeline_execution: bool = False,
        return_ranked_to_cpu: bool = False,
        model_init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        refuse_overrides(self, ModelWrapper, "_process_args", "_pad_helper", "convert_int64_to_int32")
        if pipeline_execution:
            refuse("ModelWrapper(pipeline_execution=True)")
        self.config, self.neuron_config = config, config.neuron_config
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0
        self.model_cls, self.tag, self.compiler_args = model_cls, tag, compiler_args
        self.model: Any = None
        self.is_compiled = False
        self.bucket_config = None
        self.priority_model_idx, self.pipeline_execution = priority_model_idx, pipeline_execution
        self.return_ranked_to_cpu, self.async_mode = return_ranked_to_cpu, False
        self.model_init_kwargs = model_init_kwargs or {}
        self.is_block_kv_layout = self.is_prefix_caching = self.is_medusa = False

    def is_neuron(self) -> bool:
        """Always False: nothing is compiled."""
        return isinstance(self.model, torch.jit.ScriptModule)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        """Build the model and load it."""
        self.model = self.model_cls(self.config)
        self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    @property
    def _is_prefill(self) -> bool:
        return self.tag in (CONTEXT_ENCODING_MODEL_TAG, VISION_ENCODER_MODEL_TAG)

    def get_target_bucket(self, *args: Any, strategy: str = "first_fit") -> int:
        """The length to pad to: the first bucket above the mask's length (the last one for exactly that length).

        Raises:
            ValueError: the input is longer than the last bucket, and may not be cut.
        """
        length, buckets = args[1].shape[1], self.neuron_config.buckets
        for place, bucket in enumerate(buckets):
            if length < bucket:
                return bucket if strategy == "first_fit" else buckets[min(place + 1, len(buckets) - 1)]
        if length == buckets[-1] or self.neuron_config.allow_input_truncation:
            return buckets[-1]
        raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]}) for {self.tag}")

    def pad_inputs(self, *args: Any, pad_type: str = "first_fit") -> tuple[Any, ...]:
        """Pad, or cut if that is allowed: a prompt's ids, mask and positions; a decode step's mask alone.

        Raises:
            ValueError: the input is longer than the stage, and may not be cut.
        """
        assert pad_type in ("max", "first_fit", "second_fit"), f"unknown pad_type {pad_type!r}"
        longest = self.neuron_config.max_context_length if self._is_prefill else self.neuron_config.max_length
        target = longest if pad_type == "max" else self.get_target_bucket(*args, strategy=pad_type)
        values = {0: self.config.pad_token_id, 1: 0, 2: 1} if self._is_prefill else {1: 0}
        padded = list(args)
        for place, value in values.items():
            more = target - args[place].shape[1]
            if more < 0 and not self.neuron_config.allow_input_truncation:
                raise ValueError(f"an input of {args[place].shape[1]} positions exceeds {target} for {self.tag}")
            if more < 0:
                warnings.warn(f"an input of {args[place].shape[1]} positions is cut to {target}", stacklevel=2)
            padded[place] = F.pad(args[place], (0, more), "constant", value)
        return tuple(padded)

    def _forward(self, *args: Any) -> Any:
        return self.model(*args)

    def _forward_with_pad(self, *args: Any) -> Any:
        """Fill the batch with copies of row 0, order the rows by sequence id, run, and pick the asked rows again."""
        seq_ids, size = args[_SEQ_IDS], self.neuron_config.max_batch_size
        ids = seq_ids.tolist()
        ids += [row for row in range(size) if row not in ids]
        ordered, order = torch.sort(torch.tensor(ids, dtype=seq_ids.dtype))

        def spread(tensor: Tensor, repeat: bool = True) -> Tensor:
            shape = [self.neuron_config.batch_size, *tensor.shape[1:]]
            if tensor.shape[0] == shape[0]:
                return tensor
            if repeat:
                padded = pad_with_first_batchline(tensor, shape)
            else:
                padded = torch.zeros(shape, dtype=tensor.dtype)
                padded[: tensor.shape[0]] = tensor
            return padded.index_select(0, order)

        padded_args = [spread(arg) for arg in args[:_SEQ_IDS]]
        padded_args += [ordered[:size], spread(args[_SAMPLING])]
        padded_args += [spread(arg, repeat=False) for arg in args[_HIDDEN : _HIDDEN + 3]]
        logits, *kv_cache = self._forward(*padded_args)
        return [logits.index_select(0, seq_ids), *kv_cache]

    def _run_in_pieces(self, args: tuple[Any, ...], rows: int) -> list[Any]:
        size = self.neuron_config.batch_size
        logits, kv_caches = [], []
        for start in range(0, rows, size):
            piece = [arg[start : start + size] for arg in args]
            if start + size <= rows:
                # Cut to the piece's own longest prompt, then pad again.
                longest = int(piece[2].max()) + 1
                piece[:3] = [arg[:, :longest] for arg in piece[:3]]
                outputs = self._forward(*self.pad_inputs(*piece, pad_type="first_fit"))
            else:
                outputs = self._forward_with_pad(*piece)
            here, *kv_caches = outputs
            for held, new in zip(self.model.kv_mgr.past_key_values, kv_caches, strict=False):
                held.data = new
            logits.append(here)
        return [torch.cat(logits, dim=0), *kv_caches]

    def forward(self, *args: Any, pad_type: str = "first_fit") -> Any:
        """[logits, K and V of every layer].

        Raises:
            RuntimeError: there is no model yet.
        """
        if self.model is None:
            raise RuntimeError("Forward called before load. Run to_cpu() or load_state_dict() before calling forward")
        given, rows = list(args), args[_SEQ_IDS].shape[0]
        for place in (_HIDDEN, _ADAPTER):
            if given[place] is None:
                given[place] = torch.zeros(rows, dtype=torch.int32)
        tensors = [arg for arg in given if isinstance(arg, Tensor)]
        tensors = [arg.to(torch.int32) if arg.dtype == torch.int64 else arg for arg in tensors]
        padded = self.pad_inputs(*tensors, pad_type=pad_type)
        if rows == self.neuron_config.batch_size:
            return self._forward(*padded)
        return self._run_in_pieces(padded, rows)
