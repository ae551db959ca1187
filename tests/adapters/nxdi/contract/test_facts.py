"""What is known of the stack, asked of the stand-in alone: it equals Hugging Face, and the traps are there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tiers import answers


def _values(case: str) -> dict[str, Any]:
    answer = answers("standin")[case]
    assert not answer.failure
    return answer.values


LLAMAS = (
    "llama_float32",
    "llama_tied",
    "llama_fused_qkv",
    "llama_vocab_parallel",
    "llama_scaled_rotation",
    "llama_biases_and_wide_heads",
    "llama_many_heads",
)


@pytest.mark.parametrize("case", LLAMAS)
@pytest.mark.parametrize("step", ["prefill", "decode 0", "decode 1", "decode 2"])
def test_llama_equals_hugging_face(case: str, step: str) -> None:
    assert _values(f"model.{case}")[f"{step} against Hugging Face"] <= 2e-6


@pytest.mark.parametrize("step", ["prefill", "decode 0", "decode 1", "decode 2"])
def test_llama_in_bfloat16_is_as_far_as_bfloat16_is(step: str) -> None:
    assert 1e-5 < _values("model.llama_bfloat16")[f"{step} against Hugging Face"] < 3e-2


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("step", ["prefill", "decode 0", "decode 1", "decode 2"])
def test_decoders_of_the_stack_equal_hugging_face(kind: str, step: str) -> None:
    assert _values(f"hub.{kind}")["beside the source"][step] is True


def test_blocks_of_experts_are_the_same_function() -> None:
    values = _values("hub.qwen3_moe")
    for step in ("prefill", "decode 0"):
        torch.testing.assert_close(values["blocks"][step], values[step], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values["widened"][step], values[step], rtol=1e-4, atol=1e-5)


def test_a_decode_mask_that_covers_the_new_token_is_wrong_without_an_error() -> None:
    values = _values("traps.the_decode_mask_covers_the_new_token")
    assert values["off by"] > 0.01
    assert torch.isfinite(values["wrong"]).all()


def test_padding_whose_positions_count_on_moves_the_last_token() -> None:
    values = _values("traps.padded_positions_count_on")
    assert values["long row"] is True
    assert values["short row off by"] > 0.01


def test_a_context_shorter_than_the_sequence_fails() -> None:
    assert _values("traps.a_context_shorter_than_the_sequence")["prefill"] == "RuntimeError"


def test_missing_weights_are_not_reported_by_loading() -> None:
    (keys,) = _values("traps.weights_that_are_missing_stay_random")["keys"]
    missing, unexpected, strict = keys
    assert {"layers.0.up.weight", "layers.1.down.bias", "lm_head.weight"} <= set(missing)
    assert unexpected == [] and strict is False


def test_unknown_keys_are_dropped() -> None:
    assert _values("traps.keys_that_are_unknown_are_dropped")["same"] is True


def test_the_first_layers_rotation_is_everyones() -> None:
    values = _values("traps.the_first_layers_rotation_is_everyones")
    assert values["collapses"] is True
    assert values["own tables differ"] is True


def test_the_embedding_counts_from_zero_in_decode() -> None:
    values = _values("traps.the_embedding_is_not_told_the_positions")
    assert set(values) >= {"prefill", "decode 0"}
    assert not torch.equal(values["prefill"], values["decode 0"])


def test_the_padding_row_is_an_ordinary_row() -> None:
    values = _values("layers.embedding")
    rows = [value for key, value in values.items() if key.endswith("padding row")]
    assert rows and all(row.abs().sum() > 0 for row in rows)


def test_biases_are_random_at_first() -> None:
    values = _values("layers.fresh_weights")
    biases = [value for key, value in values.items() if key.endswith("bias")]
    assert biases and all(bias.abs().min() > 0 for bias in biases)


def test_padded_layers_need_eval() -> None:
    assert set(_values("layers.pad_needs_eval").values()) == {"RuntimeError"}


def test_the_scale_is_a_divisor() -> None:
    values = _values("attention.sizes_and_scales")
    assert not torch.allclose(values["scale is a divisor hidden"], values["biases hidden"])
    assert values["one kv head k"].shape[1] == 1


def test_a_window_past_the_sequence_fails() -> None:
    assert _values("traps.a_window_past_the_sequence")["error"] in ("RuntimeError", "IndexError")


def test_the_attention_output_unpacks_to_four() -> None:
    assert _values("attention.result_shape")["unpacks to"] == 4


def test_polar_rotation_has_no_effect_in_a_window() -> None:
    assert _values("attention.polar_option")["windowed ignores it"] is True


def test_one_norm_for_grouped_queries_and_keys_fails_before_the_rotation() -> None:
    assert _values("attention.norms_of_queries_and_keys")["use_qk_norm grouped"] == "RuntimeError"


def test_dtypes_that_the_cpu_path_refuses() -> None:
    assert set(_values("traps.dtypes_that_are_refused").values()) == {"NotImplementedError"}


def test_a_layer_starts_the_process_group_by_itself() -> None:
    values = _values("startup.a_layer_starts_one_rank_by_itself")
    assert values["before"] is False and values["after"] is True
    assert values["a second process group"] == "ValueError"
    assert _values("startup.a_layer_after_the_process_group_alone")["error"] == "ValueError"


def test_rows_stay_where_they_are_without_continuous_batching() -> None:
    assert _values("traps.row_ids_do_not_move_rows")["prefill"] is True
