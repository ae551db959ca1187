"""Whole models, prefill and decode of ragged rows: Llama from a Hugging Face checkpoint, and the tiny port."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from registry import case
from sessions import LENGTHS, decode, prefill, prompts, session, tiny
from world import one_rank, served

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _hugging_face(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options})).eval()
    for name, param in model.named_parameters():
        param.data.normal_(1.0 if "norm" in name else 0.0, param.shape[-1] ** -0.5)
    return model


def _reference(model: Any, steps: int = 3) -> dict[str, Any]:
    """The same session, one row at a time, without padding and without a cache."""
    ids, _, _ = prompts()
    rows = [ids[row, : LENGTHS[row]] for row in range(2)]
    out = {"prefill": torch.cat([model(row[None]).logits[:, -1:] for row in rows])}
    for turn in range(steps):
        new = torch.randint(1, 61, (2, 1), generator=torch.Generator().manual_seed(50 + turn))
        rows = [torch.cat([row, new[n]]) for n, row in enumerate(rows)]
        out[f"decode {turn}"] = torch.cat([model(row[None]).logits[:, -1:] for row in rows])
    return out


def _llama(reference: Any, **flags: Any) -> Any:
    one_rank()
    from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaForCausalLM
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    folder = tempfile.mkdtemp(prefix="equiport-llama-")
    reference.save_pretrained(folder)
    config = LlamaInferenceConfig(served(**flags), load_config=load_pretrained_config(folder))
    model = NeuronLlamaForCausalLM(folder, config)
    model.to_cpu()
    return model


def _against_hugging_face(flags: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    reference = _hugging_face(**options)
    out = session(_llama(reference, **(flags or {})))
    dtype = (flags or {}).get("torch_dtype", torch.float32)
    wanted = _reference(reference.to(dtype))
    # The figure against Hugging Face, to two digits, so that it is the same on both tiers.
    for key, value in wanted.items():
        off = (out[key].double() - value.double()).norm() / value.double().norm()
        out[f"{key} against Hugging Face"] = float(f"{off.item():.0e}")
    return out


@case
def llama_float32() -> dict[str, Any]:
    return _against_hugging_face()


@case
def llama_bfloat16() -> dict[str, Any]:
    return _against_hugging_face({"torch_dtype": torch.bfloat16})


@case
def llama_tied() -> dict[str, Any]:
    return _against_hugging_face(tie_word_embeddings=True)


@case
def llama_fused_qkv() -> dict[str, Any]:
    return _against_hugging_face({"fused_qkv": True})


@case
def llama_vocab_parallel() -> dict[str, Any]:
    return _against_hugging_face({"vocab_parallel": True})


@case
def llama_scaled_rotation() -> dict[str, Any]:
    return _against_hugging_face(rope_scaling=LLAMA3, rope_theta=5e5)


@case
def llama_biases_and_wide_heads() -> dict[str, Any]:
    return _against_hugging_face(attention_bias=True, mlp_bias=True, head_dim=16)


@case
def llama_many_heads() -> dict[str, Any]:
    return _against_hugging_face(num_attention_heads=8, num_key_value_heads=8)


@case
def llama_state() -> dict[str, Any]:
    """The keys, shapes and dtypes of the built model, and the converted checkpoint."""
    model = _llama(_hugging_face(), torch_dtype=torch.bfloat16)
    inner = model.context_encoding_model.model
    return {
        "state": {key: [list(value.shape), str(value.dtype)] for key, value in inner.state_dict().items()},
        "checkpoint": sorted(model.checkpoint_loader_fn()),
        "stages": [stage.tag for stage in model.models],
        "buckets": [stage.neuron_config.buckets for stage in model.models],
        "one model": model.models[0].model is model.models[1].model,
        "evaluating": not any(module.training for module in model.modules()),
    }


@case
def tiny_port() -> dict[str, Any]:
    return session(tiny())


@case
def tiny_port_bfloat16() -> dict[str, Any]:
    return session(tiny({"torch_dtype": torch.bfloat16}))


@case
def sliding_window() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for window in (3, 5, 16):
        found = session(tiny(sliding_window=window), steps=5)
        out.update({f"{window} {key}": value for key, value in found.items()})
    return out


@case
def chunked_attention() -> dict[str, Any]:
    out = {f"4 {key}": value for key, value in session(tiny(attention_chunk_size=4), steps=5).items()}
    return {**out, **{f"16 {key}": value for key, value in session(tiny(attention_chunk_size=16)).items()}}


@case
def left_padding() -> dict[str, Any]:
    model = tiny({"padding_side": "left", "seq_len": 7, "max_context_length": 7})
    ids, mask, _ = prompts()
    ids = torch.stack([ids[row].roll(7 - LENGTHS[row]) for row in range(2)])
    mask = torch.stack([mask[row].roll(7 - LENGTHS[row]) for row in range(2)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = prefill(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    step = decode(model, attention_mask=mask, position_ids=torch.tensor([[7], [4]]))
    return {"prefill": first, "decode": step}


@case
def continuous_batching() -> dict[str, Any]:
    flags = {"is_continuous_batching": True, "ctx_batch_size": 1, "batch_size": 2}
    model = tiny(flags)
    out = session(model)
    swapped = torch.tensor([1, 0])
    out["swapped prefill"] = prefill(model, seq_ids=swapped)
    out["decode in cache order"] = decode(model)
    out["decode swapped"] = decode(model, seq_ids=swapped)
    ids, mask, positions = prompts()
    one = {"input_ids": ids[:1], "attention_mask": mask[:1], "position_ids": positions[:1]}
    out["one row"] = model(**one, seq_ids=torch.tensor([1])).logits
    out["one row decode"] = decode(model, rows=1, seq_ids=torch.tensor([1]))
    out["cache"] = model.token_generation_model.model.kv_mgr.past_key_values[1].detach()
    return out


@case
def fewer_rows_than_the_batch() -> dict[str, Any]:
    model = tiny({"batch_size": 3})
    out = session(model, steps=1)
    ids, mask, positions = prompts()
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    out["rows 2 and 0"] = model(**call, seq_ids=torch.tensor([2, 0])).logits
    out["cache"] = model.context_encoding_model.model.kv_mgr.past_key_values[0].detach()
    return out


@case
def more_rows_than_the_batch() -> dict[str, Any]:
    return {"prefill": prefill(tiny(), rows=4), "decode": decode(tiny(), rows=4)}


@case
def what_is_left_out_is_filled_in() -> dict[str, Any]:
    model = tiny()
    out = {"no mask": prefill(model, attention_mask=None), "no ids of rows": prefill(model, seq_ids=None)}
    out["decode without a mask"] = decode(model, attention_mask=None)
    lengths = torch.tensor(LENGTHS)[:, None]
    out["inferred"] = model._infer_attention_mask(lengths)
    return {**out, "inferred of a prompt": model._infer_attention_mask(prompts()[2])}


@case
def greedy_on_device() -> dict[str, Any]:
    flags = {"on_device_sampling_config": {"top_k": 1}}
    ids, mask, positions = prompts()
    call = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    tokens = tiny(flags)(**call)
    both = tiny({**flags, "output_logits": True})(**call)
    return {"tokens": tokens.tokens, "logits": tokens.logits, "both": both.tokens, "both logits": both.logits}


@case
def masks() -> dict[str, Any]:
    out: dict[str, Any] = {}
    _, mask, positions = prompts()
    mask = torch.nn.functional.pad(mask, (0, 16 - mask.shape[1]))
    lengths = torch.tensor(LENGTHS)[:, None]
    for name, attributes in {
        "plain": {},
        "window": {"sliding_window": 5},
        "chunk": {"attention_chunk_size": 4},
    }.items():
        model = tiny(**attributes).context_encoding_model.model
        out[f"{name} prefill"] = model.create_attn_mask(mask, True, False, position_ids=positions)
        out[f"{name} decode"] = model.create_attn_mask(mask, False, False, position_ids=lengths)
        out[f"{name} window prefill"] = model._create_windowed_attn_mask_cte(mask, 3)
        out[f"{name} window decode"] = model._create_windowed_attn_mask_tkg(mask, 5, torch.tensor([[2], [9]]))
        out[f"{name} chunk prefill"] = model._create_chunked_attn_mask_cte(mask, 3)
        out[f"{name} chunk decode"] = model._create_chunked_attn_mask_tkg(mask, 4, torch.tensor([[8], [6]]))
        out[f"{name} padding"] = model.create_padding_mask(positions)
    left = tiny({"padding_side": "left"}).context_encoding_model.model
    return {**out, "left": left.create_attn_mask(mask, True, False)}


@case
def bucketed() -> dict[str, Any]:
    """Buckets do not work on the CPU on either tier: the masks stay at seq_len."""
    from registry import outcome

    model = tiny(
        {"seq_len": 32, "max_context_length": 32, "enable_bucketing": True, "context_encoding_buckets": [8, 32]}
    )
    return {"short": outcome(lambda: prefill(model)), "buckets": model.context_encoding_model.neuron_config.buckets}
