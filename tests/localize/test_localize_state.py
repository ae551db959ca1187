"""A mixer whose decode keeps nothing of the tokens before: told from other faults of decode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equiport.compare.thresholds import Thresholds
from equiport.fixtures.tokens import draw_batch
from equiport.localize.case import Case, Observation
from equiport.localize.search import Explanation, explain
from equiport.reference.model import load_reference
from equiport.structure.mapping import MappingEntry
from equiport.trace.reference import capture_reference
from tests.localize.defects import SHARED, model_folder

LFM2: dict[str, Any] = {
    **SHARED, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3,
    "conv_bias": False, "layer_types": ["conv", "full_attention"], "rope_theta": 1e4, "block_ff_dim": 80,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
CONV, ATTENTION = "model.layers.0.conv", "model.layers.1.self_attn"
Ported = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(source module, its hidden input [B, T, H], its output) -> what the port gives in decode, [B, T, H]."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def last_tap(module: Any, hidden: Tensor, _: Tensor) -> Tensor:
    """The convolution over a window of zeros and the token itself: its last tap alone."""
    gate, out, x = module.in_proj(hidden).chunk(3, dim=-1)
    return module.out_proj(out * (gate * x * module.conv.weight[:, 0, -1]))  # type: ignore[no-any-return]


def newer_tap_lost(module: Any, hidden: Tensor, exact: Tensor) -> Tensor:
    """The state is kept, but its newest entry is not seen."""
    gate, out, x = module.in_proj(hidden).chunk(3, dim=-1)
    before = nn.functional.pad(gate * x, (0, 0, 1, 0))[:, :-1] * module.conv.weight[:, 0, -2]
    return exact - module.out_proj(out * before)  # type: ignore[no-any-return]


def own_value(module: Any, hidden: Tensor, _: Tensor) -> Tensor:
    """Attention over one key gives its value."""
    value = module.v_proj(hidden).unflatten(-1, (-1, module.head_dim))
    return module.out_proj(value.repeat_interleave(2, dim=2).flatten(2))  # type: ignore[no-any-return]


def found_in(root: Path, path: str, ported: Ported) -> Explanation:
    lengths = (17, 6)
    cases = []
    for seed in (11, 12):
        folder = model_folder(root, LFM2, seed)
        batch = draw_batch(131, lengths, 4, seed)
        source, low = load_reference(folder, torch.float32), load_reference(folder, torch.bfloat16)
        feed = capture_reference(source, batch, (path,))
        exact, hidden = feed.outputs[path], feed.inputs[path]
        rounded = capture_reference(low, batch, (path,), feed=feed).outputs[path]
        with torch.no_grad():
            late = ported(source.get_submodule(path), hidden, exact)
        observations = []
        for phase, given in (("prefill", exact), ("decode", late)):
            at = [
                (row, token)
                for row, ids in enumerate(batch.rows)
                for token in range(len(ids))
                if (token >= lengths[row]) == (phase == "decode")
            ]
            places = torch.tensor(at)
            rows, tokens = places.unbind(1)
            baseline = float((rounded[rows, tokens].double() - exact[rows, tokens].double()).norm())
            observations.append(Observation(phase, given[rows, tokens], baseline, places))
        entry = MappingEntry((path,), (path,), component_type="")
        cases.append(Case(source, (path,), entry, batch, feed, tuple(observations)))
    return explain(cases, Thresholds())


@pytest.mark.parametrize(("path", "ported"), [(CONV, last_tap), (ATTENTION, own_value)])
def test_a_state_that_is_not_carried_is_the_cause(tmp_path: Path, path: str, ported: Ported) -> None:
    found = found_in(tmp_path, path, ported)
    assert found.proven and found.ranked[0].kind == "state not carried in decode"
    assert path in found.ranked[0].says and found.before > 10 and found.ranked[0].r32 < 1e-3


def test_a_state_of_which_a_part_is_lost_is_not_called_that(tmp_path: Path) -> None:
    found = found_in(tmp_path, CONV, newer_tap_lost)
    assert found.before > 10 and not (found.proven and found.ranked[0].kind == "state not carried in decode")
