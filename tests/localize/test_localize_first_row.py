"""Every row of a batch is given what a projection gives the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from equiport.bench.portbugs.operator import wrap_forward
from equiport.compare.thresholds import Thresholds
from equiport.fixtures.tokens import TokenBatch, draw_batch
from equiport.localize.case import Case, Observation
from equiport.localize.search import Explanation, explain
from equiport.reference.model import load_reference
from equiport.structure.mapping import MappingEntry
from equiport.trace.reference import capture_reference
from tests.localize.defects import SHARED, model_folder

OPT: dict[str, Any] = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 48, "word_embed_proj_dim": 48,
    "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 131,
    "max_position_embeddings": 128, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "dropout": 0.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **SHARED, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
LAYER, MLP = "model.decoder.layers.0", "model.layers.0.mlp"
FC2, DOWN, UP = f"{LAYER}.fc2", f"{MLP}.down_proj", f"{MLP}.up_proj"
WORDS = "all rows of the batch are given the first row's output of"
Inject = Callable[[nn.Module, int], None]


def first_for_all(path: str) -> Inject:
    """The projection's output is that of the first of so many rows."""

    def inject(model: nn.Module, rows: int) -> None:
        def run(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            out = original(x)
            own = out.reshape(rows, -1, out.shape[-1])
            return own[:1].expand_as(own).reshape(out.shape)

        wrap_forward(model.get_submodule(path), run)

    return inject


def next_for_each(model: nn.Module, rows: int) -> None:
    """Another defect of rows: each gets the next one's."""

    def run(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = original(x)
        return out.reshape(rows, -1, out.shape[-1]).roll(-1, 0).reshape(out.shape)

    wrap_forward(model.get_submodule(FC2), run)


def together(model: nn.Module, batch: TokenBatch, path: str) -> dict[tuple[int, int], Tensor]:
    """All rows in one right-padded batch with a cache: the module's output at (row, token)."""
    found: dict[tuple[int, int], Tensor] = {}
    places: list[list[tuple[int, int]]] = []

    def keep(_: nn.Module, args: object, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        for row, tokens in enumerate(places):
            found.update({place: value[row, at] for at, place in enumerate(tokens)})

    lengths = torch.tensor(batch.prompt_lengths)
    width = int(lengths.max())
    mask = (torch.arange(width)[None] < lengths[:, None]).long()
    ids, cache = batch.padded(), DynamicCache()
    handle = model.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        places[:] = [[(row, at) for at in range(length)] for row, length in enumerate(batch.prompt_lengths)]
        positions = torch.arange(width)[None].expand(batch.batch_size, -1)
        model(input_ids=ids[:, :width], attention_mask=mask, position_ids=positions, past_key_values=cache)
        for step in range(batch.decode_steps):
            at = lengths + step
            places[:] = [[(row, int(place))] for row, place in enumerate(at)]
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            now = at[:, None]
            model(input_ids=ids.gather(1, now), attention_mask=mask, position_ids=now, past_key_values=cache)
    handle.remove()
    return found


def cases_of(folder: Path, path: str, inject: Inject, batches: list[TokenBatch]) -> list[Case]:
    """One case a batch; all of them were run together, by one model."""
    run = TokenBatch(
        tuple(row for batch in batches for row in batch.rows),
        tuple(length for batch in batches for length in batch.prompt_lengths),
        batches[0].decode_steps,
    )
    source, low, port = (load_reference(folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32))
    inject(port, run.batch_size)
    given, before, cases = together(port, run, path), 0, []
    for batch in batches:
        feed = capture_reference(source, batch, (path,))
        rounded, exact = capture_reference(low, batch, (path,), feed=feed).outputs[path], feed.outputs[path]
        observations = []
        for phase, late in (("prefill", False), ("decode", True)):
            places = torch.tensor(
                [
                    (row, at)
                    for row, (ids, length) in enumerate(zip(batch.rows, batch.prompt_lengths, strict=True))
                    for at in range(length if late else 0, len(ids) if late else length)
                ]
            )
            rows, tokens = places.unbind(1)
            target = torch.stack([given[before + row, at] for row, at in places.tolist()])
            baseline = float((rounded[rows, tokens].double() - exact[rows, tokens].double()).norm())
            observations.append(Observation(phase, target, baseline, places))
        entry = MappingEntry((path,), (path,), component_type="layer")
        cases.append(Case(source, (path,), entry, batch, feed, tuple(observations), run.prompt_lengths[0]))
        before += batch.batch_size
    return cases


def drawn(*lengths: tuple[int, int]) -> list[TokenBatch]:
    return [draw_batch(131, pair, 3, seed) for seed, pair in enumerate(lengths)]


def search(cases: list[Case]) -> Explanation:
    torch.set_num_threads(1)
    return explain(cases, Thresholds())


@pytest.mark.parametrize(
    ("config", "path", "linear"), [(OPT, LAYER, FC2), (LLAMA, MLP, DOWN), (LLAMA, MLP, UP)], ids=["opt", "down", "up"]
)
def test_the_first_rows_output_for_all_is_proven(
    tmp_path: Path, config: dict[str, Any], path: str, linear: str
) -> None:
    cases = [
        case
        for seed in (11, 12)
        for case in cases_of(model_folder(tmp_path, config, seed), path, first_for_all(linear), drawn((14, 9)))
    ]
    found = search(cases)
    assert found.before > 10 and found.proven and found.ranked[0].says == f"{WORDS} {linear}"
    assert found.ranked[0].kind == "batch row mixed up" and found.ranked[0].r32 < 1e-2


def test_the_first_row_of_a_run_of_several_seeds(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, OPT, 11)
    cases = cases_of(folder, LAYER, first_for_all(FC2), drawn((14, 9), (12, 5)))
    found = search(cases)
    assert found.proven and found.ranked[0].says == f"{WORDS} {FC2}"
    alone = search(cases[1:])
    assert not (alone.proven and alone.ranked[0].says.startswith(WORDS))


@pytest.mark.parametrize("inject", [lambda model, rows: None, next_for_each], ids=["right", "next row's"])
def test_a_right_layer_and_another_row_are_not_explained_by_it(tmp_path: Path, inject: Inject) -> None:
    found = search(cases_of(model_folder(tmp_path, OPT, 11), LAYER, inject, drawn((14, 9))))
    assert found.before < 1 if inject is not next_for_each else found.before > 10
    assert not (found.proven and found.ranked[0].says.startswith(WORDS))
