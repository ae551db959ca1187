"""The key/value cache: shapes, prefill and decode writes, reads."""

from __future__ import annotations

from typing import Any

import torch
from registry import case, outcome
from world import described, draw, one_rank, served


def _manager(flags: dict[str, Any] | None = None, **options: Any) -> Any:
    one_rank()
    from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager

    return KVCacheManager(described(served(seq_len=10, **(flags or {}))), num_kv_head=2, **options)


def _new(rows: int, length: int, seed: int = 1) -> list[tuple[Any, Any]]:
    return [(draw(rows, 2, length, 8, seed=seed + n), draw(rows, 2, length, 8, seed=seed + n + 9)) for n in range(2)]


def _write(manager: Any, new: Any, prefill: bool, positions: Any, rows: Any = None, length: int = 10) -> list[Any]:
    rows = torch.arange(positions.shape[0]) if rows is None else rows
    updated = manager.update_cache(
        is_for_context_encoding=prefill, seq_ids=rows, position_ids=positions, new_key_values=new, seq_len=length
    )
    for held, value in zip(manager.past_key_values, updated, strict=True):
        held.data = value
    return [value.clone() for value in updated]


def _session(manager: Any, steps: Any, length: int = 10) -> dict[str, Any]:
    """Prefill two rows of six positions, then decode at `steps`."""
    positions = torch.arange(6)[None].expand(2, -1)
    out = {f"prefill {n}": value for n, value in enumerate(_write(manager, _new(2, 6), True, positions, length=length))}
    for turn, at in enumerate(steps):
        found = _write(manager, _new(2, 1, 30 + turn), False, torch.tensor(at)[:, None], length=length)
        out.update({f"step {turn} {n}": value for n, value in enumerate(found)})
    read = manager.get_cache(seq_len=length, seq_ids=torch.arange(2))
    return {**out, "read": read[1][0], "read v": read[0][1], "read types": type(read[0]).__name__}


@case
def shapes() -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, manager in {
        "plain": _manager(),
        "window": _manager(sliding_window=4),
        "chunk": _manager(attention_chunk_size=4),
        "long chunk": _manager(attention_chunk_size=40),
        "by layer": _manager(layer_to_cache_size_mapping=[4, 10]),
        "bfloat16": _manager({"torch_dtype": torch.bfloat16}),
        "rows": _manager({"kv_cache_batch_size": 5}),
    }.items():
        out[name] = [list(value.shape) for value in manager.past_key_values]
        out[f"{name} dtype"] = str(manager.past_key_values[0].dtype)
    out["keys"] = sorted(_manager().state_dict())
    return out


@case
def right_padded() -> dict[str, Any]:
    return _session(_manager(), [(6, 3), (7, 4)])


@case
def left_padded() -> dict[str, Any]:
    return _session(_manager({"padding_side": "left"}), [(6, 6)], length=6)


@case
def sliding_ring() -> dict[str, Any]:
    manager = _manager(sliding_window=4)
    positions = torch.arange(6)[None].expand(2, -1)
    out = {"prefill": _write(manager, _new(2, 3), True, positions, length=4)[0]}
    for turn, at in enumerate(((6, 3), (7, 4), (8, 5), (9, 6))):
        out[f"step {turn}"] = _write(manager, _new(2, 1, 30 + turn), False, torch.tensor(at)[:, None], length=4)[2]
    return out


@case
def chunks_and_layers_of_their_own() -> dict[str, Any]:
    chunked = _manager(attention_chunk_size=4)
    out = {"chunk": _write(chunked, _new(2, 1), False, torch.tensor([[6], [3]]), length=4)[0]}
    mixed = _manager(attention_chunk_size=4, layer_to_cache_size_mapping=[4, 10])
    for idx, at in ((0, [[6], [3]]), (1, [[6], [3]])):
        k, v = mixed.update_kv_by_layer_id(
            idx=idx,
            is_for_context_encoding=False,
            seq_ids=torch.arange(2),
            position_ids=torch.tensor(at),
            kv_per_layer=_new(2, 1)[0],
            seq_len=4,
        )
        out[f"layer {idx} k"], out[f"layer {idx} v"] = k, v
        out[f"layer {idx} read"] = mixed.get_kv_by_layer_id(idx=idx, seq_len=4)[0]
    return out


@case
def continuous_batching() -> dict[str, Any]:
    manager = _manager({"is_continuous_batching": True, "ctx_batch_size": 1})
    positions = torch.arange(6)[None]
    out = {"row 1": _write(manager, _new(1, 6), True, positions, torch.tensor([1]))[0]}
    out["row 0"] = _write(manager, _new(1, 4, 20), True, positions[:, :4], torch.tensor([0]))[0]
    out["two at once"] = outcome(lambda: _write(manager, _new(2, 6), True, positions.expand(2, -1)))
    return out


@case
def fewer_rows_than_the_cache() -> dict[str, Any]:
    manager = _manager({"kv_cache_batch_size": 4})
    rows, at = torch.tensor([2, 0]), torch.tensor([[6], [3]])
    return {f"{n}": value for n, value in enumerate(_write(manager, _new(2, 1), False, at, rows))}


@case
def buffers_and_errors() -> dict[str, Any]:
    manager = _manager()
    flat = [draw(2, 2, 10, 8, seed=n) for n in range(4)]
    pairs = [(flat[0], flat[1]), (flat[2], flat[3])]
    longer = [(draw(2, 2, 12, 8),) * 2] * 2
    return {
        "flat": manager.get_kv_by_layer_id(idx=1, seq_len=5, kvcache_buffer=flat)[1],
        "pairs": manager.get_kv_by_layer_id(idx=1, seq_len=5, kvcache_buffer=pairs)[0],
        "whole": manager.get_kv_by_layer_id(idx=0, seq_len=5, skip_slice=True, kvcache_buffer=flat)[0],
        "longer than there is": manager.get_kv_by_layer_id(idx=0, seq_len=99, kvcache_buffer=flat)[0],
        "bad buffer": outcome(lambda: manager.get_kv_by_layer_id(idx=0, seq_len=5, kvcache_buffer=flat[:3])),
        "prefill too long": outcome(lambda: _write(manager, longer, True, torch.arange(12)[None].expand(2, -1))),
        "step too far": outcome(lambda: _write(manager, _new(2, 1), False, torch.tensor([[10], [3]]))),
        "row of a sequence": manager.get_cache_update_index_for_seq_ids(torch.tensor([1, 0])),
    }


@case
def writes() -> dict[str, Any]:
    from neuronx_distributed_inference.modules.kvcache import utils

    cache, new = draw(3, 2, 6, 4), draw(2, 2, 3, 4, seed=2)
    at = [torch.tensor(n) for n in (1, 0, 4, 0)]
    mapping = utils.get_layer_to_kv_cache_size_mapping_for_mixed_attn
    return {
        "prefix": utils.fill_prefix(cache.clone(), new),
        "in place": (lambda held: utils.fill_prefix(held, new) is held)(cache.clone()),
        "slice": utils.dynamic_update_slice(cache, new, at),
        "rows": utils.update_cache_const_indices(cache, new, torch.tensor([2, 0])),
        "mapping": mapping(4, 9, [True, False, 1, 0]),
        "no size": outcome(lambda: mapping(None, 9, [True])),
        "kv shapes": [list(shape) for shape in utils.get_kv_shapes(256, 2, 3, 4)],
        "transposed": [list(shape) for shape in utils.get_kv_shapes(256, 2, 3, 4, True, True)],
    }
