"""Keys that a config class fills from another: found by building it, and only where the source listens to the other."""

from __future__ import annotations

import json
from typing import Any

from transformers import GPTNeoXConfig, Qwen2Config

from equiport.reference.filled_keys import FilledKeys

_NEOX = {
    "model_type": "gpt_neox", "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64,
    "intermediate_size": 96, "rotary_emb_base": 10000, "rotary_pct": 0.25,
}  # fmt: skip


def _saved(made: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """config.json of a folder that transformers saved, with the keys of the model's own."""
    return {**json.loads(json.dumps(made.to_dict())), **raw}


def _holds(value: Any, wanted: float) -> bool:
    return wanted in value.values() if isinstance(value, dict) else bool(value == wanted)


def test_what_saving_adds_is_stale_when_its_key_is_changed() -> None:
    saved = _saved(GPTNeoXConfig.from_dict(_NEOX), _NEOX)
    changed = {**saved, "rotary_emb_base": 500}
    # one of them, under the name that this transformers has for it
    (stale,) = FilledKeys(saved, _NEOX).stale(changed)
    assert stale.name in ("rope_theta", "rope_parameters") and _holds(stale.value, 500)


def test_a_key_that_follows_nothing_is_no_result() -> None:
    saved = _saved(GPTNeoXConfig.from_dict(_NEOX), _NEOX)
    filled = FilledKeys(saved, _NEOX)
    assert filled.stale({**saved, "layer_norm_eps": 0.1}) == ()
    assert filled.stale(saved) == ()
    # not in the file, so nothing is left behind
    assert FilledKeys(_NEOX).stale({**_NEOX, "rotary_emb_base": 500}) == ()


def test_a_value_of_its_own_is_no_result() -> None:
    saved = _saved(GPTNeoXConfig.from_dict(_NEOX), _NEOX)
    for name in {"rope_theta", "rope_parameters"} & set(saved):
        own = {**saved, name: 777 if name == "rope_theta" else {"rope_type": "default", "rope_theta": 777}}
        assert FilledKeys(own, _NEOX).stale({**own, "rotary_emb_base": 500}) == ()


def test_a_published_key_that_wins_over_what_fills_it_stays() -> None:
    raw = {
        "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 2,
    }  # fmt: skip
    saved = _saved(Qwen2Config.from_dict(raw), raw)
    changed = {**saved, "max_window_layers": 3}
    assert FilledKeys(saved, saved).stale(changed) == ()
    (stale,) = FilledKeys(saved, raw).stale(changed)
    assert stale.name == "layer_types" and stale.value.count("sliding_attention") == 1


def test_a_class_that_is_not_known_or_refuses_has_none() -> None:
    assert FilledKeys({"model_type": "nobody's", "a": 1}).stale({"model_type": "nobody's", "a": 2}) == ()
    saved = _saved(GPTNeoXConfig.from_dict(_NEOX), _NEOX)
    assert FilledKeys(saved, _NEOX).stale({**saved, "hidden_size": "wide"}) == ()
