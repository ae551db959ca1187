"""Windows: those that an attention holds itself, and those whose cache is read whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equiport.bench.portbugs.operator import attend, decoding, edit_output
from equiport.localize.layers import explains
from tests.localize.defects import SHARED, case_of, explained, model_folder

GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "hidden_size": 48, "num_layers": 2, "num_heads": 4,
    "attention_types": [[["local", "global"], 1]], "window_size": 8, "intermediate_size": 80, "vocab_size": 131,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXAONE: dict[str, Any] = {
    **SHARED, "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "rms_norm_eps": 1e-4,
    "sliding_window": 8, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"],
    "hidden_act": "silu", "rope_theta": 1e4,
}  # fmt: skip
NEO_PATH, PATH = "transformer.h.0.attn", "model.layers.0.self_attn"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def windowed(width: int | None, path: str = NEO_PATH) -> Any:
    """The held mask of one layer with another width."""

    def inject(model: nn.Module) -> None:
        held = model.get_submodule(f"{path}.attention")
        causal = torch.ones_like(held.bias).tril()  # type: ignore[arg-type]
        held.bias = causal if width is None else causal & ~torch.ones_like(causal).tril(-width)

    return inject


@pytest.mark.parametrize(("width", "words"), [(None, "has no window, the source one of 8"), (9, "a window of 9")])
def test_a_window_that_the_attention_holds_is_missing_or_another(tmp_path: Path, width: int | None, words: str) -> None:
    found = explained(tmp_path, GPT_NEO, NEO_PATH, windowed(width))
    assert found.proven and found.ranked[0].kind == "window" and words in found.ranked[0].says
    assert found.before > 1 and found.ranked[0].r32 < 1e-3


def test_another_defect_of_the_same_attention_is_no_window(tmp_path: Path) -> None:
    def inject(model: nn.Module) -> None:
        edit_output(model.get_submodule(NEO_PATH), lambda out: out * 1.25)

    found = explained(tmp_path, GPT_NEO, NEO_PATH, inject)
    assert found.proven and found.ranked[0].kind == "scale or multiplier"


def read_whole(model: nn.Module) -> None:
    """No window; of the prompt the last seven tokens stay in the cache, zeros are attended for the others."""
    prompt = [0]

    def core(original: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        if not decoding(q, k):
            prompt[0] = k.shape[-2]
            mask = torch.full((1, 1, prompt[0], prompt[0]), torch.finfo(q.dtype).min).triu(1)
            return original(module, q, k, v, mask, **options)
        lost = torch.arange(k.shape[-2]) < prompt[0] - 7
        k, v = (side.masked_fill(lost[None, None, :, None], 0.0) for side in (k, v))
        return original(module, q, k, v, None, **options)

    attend(model.get_submodule(PATH), core)


def normed_twice(model: nn.Module) -> None:
    """q and k over all heads, before their own norms."""
    for name in ("q_proj", "k_proj"):
        edit_output(
            model.get_submodule(f"{PATH}.{name}"), lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], None, 1e-4)
        )


def test_a_rolling_cache_that_is_read_whole_is_proven(tmp_path: Path) -> None:
    found = explained(tmp_path, EXAONE, PATH, read_whole)
    assert found.proven and found.ranked[0].kind == "window"
    assert "leaves 7 tokens in the cache" in found.ranked[0].says


def test_norms_taken_twice_are_proven_with_it(tmp_path: Path) -> None:
    def both(model: nn.Module) -> None:
        read_whole(model)
        normed_twice(model)

    found = explained(tmp_path, EXAONE, PATH, both)
    assert found.proven and sorted(found.ranked[0].kind.split(" + ")) == ["qk-norm", "window"]
    assert "leaves 7 tokens" in found.ranked[0].says and "over all heads at once" in found.ranked[0].says


@pytest.mark.parametrize(("config", "path"), [(GPT_NEO, NEO_PATH), (EXAONE, PATH)])
def test_a_right_port_agrees_and_nothing_is_nearer(tmp_path: Path, config: dict[str, Any], path: str) -> None:
    case = case_of(model_folder(tmp_path, config, 11), path, lambda model: None, 11)
    assert case.distance(case.outputs()) < 1e-3


def test_a_cause_is_tried_in_another_layer_by_its_words(tmp_path: Path) -> None:
    other = NEO_PATH.replace("0", "1")
    folder = model_folder(tmp_path, {**GPT_NEO, "attention_types": [[["local"], 2]]}, 11)
    says = f"{NEO_PATH}.attention has no window, the source one of 8"
    for inject, alike in ((windowed(None, other), True), (windowed(9, other), False)):
        assert explains(says, (NEO_PATH,), case_of(folder, other, inject, 11), 1e-3) is alike
    case = case_of(folder, other, windowed(None, other), 11)
    assert not explains(f"{says}; and the output is x 2 of the source's", (NEO_PATH,), case, 1e-3)
    assert not explains("words of no candidate", (NEO_PATH,), case, 1e-3)
