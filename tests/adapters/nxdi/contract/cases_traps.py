"""Mistakes of a port, or of a call, that the stack does not catch: the stand-in must not catch or heal them either."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from sessions import LENGTHS, decode, prefill, prompts, session, tiny, tiny_weights
from world import one_rank, served


def _off(value: Any, reference: Any) -> float:
    return float(f"{((value - reference).norm() / reference.norm()).item():.1e}")


@case
def the_decode_mask_covers_the_new_token() -> dict[str, Any]:
    model = tiny()
    prefill(model)
    right = decode(model)
    prefill(model)
    wrong = decode(model, beyond=1)
    return {"wrong": wrong, "right": right, "off by": _off(wrong, right)}


@case
def padded_positions_count_on() -> dict[str, Any]:
    """The last token is taken where the position is largest: padding must hold 1."""
    ids, mask, _ = prompts()
    counting = torch.arange(ids.shape[1])[None].expand(2, -1)
    model = tiny()
    wrong, right = prefill(model, position_ids=counting), prefill(model)
    return {"wrong": wrong, "long row": torch.equal(wrong[0], right[0]), "short row off by": _off(wrong[1], right[1])}


@case
def a_context_shorter_than_the_sequence() -> dict[str, Any]:
    model = tiny({"seq_len": 16, "max_context_length": 8})
    return {"prefill": outcome(lambda: prefill(model)), "buckets": [s.neuron_config.buckets for s in model.models]}


@case
def a_position_of_zero_is_a_prefill() -> dict[str, Any]:
    model = tiny()
    ids = torch.tensor([[3], [4]])
    call = {"input_ids": ids, "attention_mask": torch.ones(2, 1, dtype=torch.long), "seq_ids": torch.arange(2)}
    found = model(**call, position_ids=torch.zeros(2, 1, dtype=torch.long))
    return {"logits": found.logits, "stage": model.kv_cache_populated}


@case
def weights_that_are_missing_stay_random() -> dict[str, Any]:
    weights = tiny_weights()
    for key in ("model.layers.0.up.weight", "model.layers.1.down.bias", "model.lm_head.weight"):
        del weights[key]
    seen: list[Any] = []
    one_rank()
    from tiny_port import TinyModel

    load = TinyModel.load_state_dict

    def watched(self: Any, state: Any, strict: bool = True, **kw: Any) -> Any:
        result = load(self, state, strict=strict, **kw)
        seen.append([sorted(result.missing_keys), sorted(result.unexpected_keys), strict])
        return result

    TinyModel.load_state_dict = watched
    try:
        torch.manual_seed(21)
        model = tiny(weights=weights)
    finally:
        TinyModel.load_state_dict = load
    return {"keys": seen, **session(model, steps=1), "whole": prefill(tiny())}


@case
def keys_that_are_unknown_are_dropped() -> dict[str, Any]:
    weights = tiny_weights()
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    weights["model.layers.7.norm.weight"] = torch.ones(32)
    return {"same": torch.equal(prefill(tiny(weights=weights)), prefill(tiny()))}


@case
def shapes_that_differ_fail() -> dict[str, Any]:
    def changed(key: str, value: Any) -> dict[str, Any]:
        return {**tiny_weights(), f"model.{key}": value}

    weights = {
        "sharded": changed("layers.0.up.weight", torch.ones(40, 32)),
        "not sharded": changed("norm.weight", torch.ones(16)),
        "heads": changed("layers.0.self_attn.q_proj.weight", torch.ones(16, 32)),
    }
    out = {name: outcome(lambda state=state: tiny(weights=state)) for name, state in weights.items()}
    absent = tiny_weights()
    del absent["model.layers.0.self_attn.k_proj.weight"]
    return {**out, "a projection absent": outcome(lambda: tiny(weights=absent))}


@case
def the_first_layers_rotation_is_everyones() -> dict[str, Any]:
    by_layer = session(tiny(rope_by_layer=True), steps=1)
    plain = session(tiny(), steps=1)
    own = session(tiny(rope_by_layer=True, drop_tables=True), steps=1)
    return {
        **by_layer,
        "collapses": torch.equal(by_layer["decode 0"], plain["decode 0"]),
        **{f"own tables {key}": value for key, value in own.items()},
        "own tables differ": not torch.equal(own["decode 0"], plain["decode 0"]),
    }


@case
def embeddings_are_handed_to_a_hook() -> dict[str, Any]:
    return session(tiny(port="ScaledForCausalLM"))


@case
def the_embedding_is_not_told_the_positions() -> dict[str, Any]:
    return session(tiny(learned_positions=True))


@case
def an_index_on_a_row_parallel_output() -> dict[str, Any]:
    model = tiny(row_of_the_batch=True)
    return session(model)


@case
def a_layer_must_return_five() -> dict[str, Any]:
    return {"error": outcome(lambda: prefill(tiny(four_outputs=True)))}


@case
def a_window_past_the_sequence() -> dict[str, Any]:
    return {"error": outcome(lambda: prefill(tiny(sliding_window=40)))}


@case
def dtypes_that_are_refused() -> dict[str, Any]:
    return {
        "float16": outcome(lambda: tiny({"torch_dtype": torch.float16})),
        "bfloat16 on two ranks": outcome(lambda: tiny({"torch_dtype": torch.bfloat16, "tp_degree": 2})),
    }


@case(fresh=True)
def two_ranks_without_a_launcher() -> dict[str, Any]:
    from tiny_port import TinyForCausalLM
    from world import described

    model = TinyForCausalLM("nowhere", described(served(tp_degree=2)))
    return {"error": outcome(model.to_cpu)}


@case
def logits_and_no_sampling() -> dict[str, Any]:
    """output_logits without sampling shifts the cache by one."""
    return {"error": outcome(lambda: prefill(tiny({"output_logits": True})))}


@case
def a_call_that_does_not_fit() -> dict[str, Any]:
    model = tiny({"seq_len": 8})
    ids = torch.randint(1, 61, (2, 9))
    long = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(9)[None].expand(2, -1),
    }
    cut = tiny({"seq_len": 8, "allow_input_truncation": True})
    bare = tiny()
    for name in ("output_attentions", "output_hidden_states"):
        delattr(bare.config, name)
    return {
        "too long": outcome(lambda: model(**long)),
        "cut": outcome(lambda: cut(**long)),
        "neither mask nor positions": outcome(lambda: model(input_ids=ids)),
        "no output_attentions in the configuration": outcome(lambda: prefill(bare)),
        "before to_cpu": outcome(lambda: type(model)(model.model_path, model.config)(**long)),
    }


@case
def stale_entries_stay_in_the_cache() -> dict[str, Any]:
    """A second prompt overwrites the leading entries alone."""
    model = tiny()
    session(model)
    ids, mask, positions = prompts()
    prefill(model, input_ids=ids[:, :3], attention_mask=mask[:, :3], position_ids=positions[:, :3])
    return {"cache": model.token_generation_model.model.kv_mgr.past_key_values[0].detach()}


@case
def row_ids_do_not_move_rows() -> dict[str, Any]:
    """Without continuous batching a call's row is the cache's row."""
    model = tiny()
    swapped = torch.tensor([1, 0])
    first = prefill(model, seq_ids=swapped)
    return {"prefill": torch.equal(first, prefill(tiny())), "decode": decode(model, seq_ids=swapped)}


@case
def hooks_hide_the_hooks_of_children() -> dict[str, Any]:
    one_rank()
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear
    from neuronx_distributed.trace.trace import invoke_preshard_hook
    from torch import nn

    calls: list[str] = []

    class Hooked(nn.Module):
        def __init__(self, name: str, child: nn.Module | None = None, bias: bool = False) -> None:
            super().__init__()
            self.name, self.child, self.add_bias = name, child, bias

        def preshard_hook(self, state: Any, prefix: str) -> None:
            calls.append(f"{self.name} {prefix}")

    inner = Hooked("inner", bias=True)
    tree = nn.ModuleDict({"a": Hooked("outer", inner), "b": nn.Sequential(inner, ColumnParallelLinear(2, 2))})
    invoke_preshard_hook(tree, {}, "")
    return {"calls": calls}


@case
def a_tied_head_needs_its_method() -> dict[str, Any]:
    weights = {key: value for key, value in tiny_weights().items() if "lm_head" not in key}
    tied = tiny(weights=weights, tie_word_embeddings=True)
    head = tied.context_encoding_model.model
    return {
        "tied": torch.equal(head.lm_head.weight, head.embed_tokens.weight),
        "logits": prefill(tied),
        "n": LENGTHS[0],
    }
