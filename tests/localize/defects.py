"""A defect put into the first layer of a small HF model, run with a cache, and what is then said to be its cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from equiport.compare.thresholds import Thresholds
from equiport.fixtures.tokens import TokenBatch, draw_batch
from equiport.fixtures.weights import WeightKind
from equiport.localize.case import Case, Observation
from equiport.localize.search import Explanation, explain
from equiport.reference.model import load_reference, materialize
from equiport.structure.mapping import MappingEntry
from equiport.trace.reference import capture_reference

Inject = Callable[[nn.Module], None]

SHARED: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def model_folder(root: Path, config: dict[str, Any], seed: int) -> Path:
    """A folder with perturbed weights of this config."""
    source = root / f"source{seed}"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    return materialize(source, root / f"model{seed}", WeightKind.PERTURBED, seed, tiny=False).folder


def case_of(folder: Path, path: str, inject: Inject, seed: int, lengths: Sequence[int] = (21, 6)) -> Case:
    """The module at `path`, whose inputs the defect does not change, as the defective model runs it with a cache."""
    batch = draw_batch(131, tuple(lengths), 4, seed)
    source, low, port = (load_reference(folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32))
    inject(port)
    feed = capture_reference(source, batch, (path,))
    rounded = capture_reference(low, batch, (path,), feed=feed).outputs[path]
    exact, given = feed.outputs[path], _run(port, batch, path)
    observations = []
    for phase, chosen in (("prefill", lambda at, n: at < n), ("decode", lambda at, n: at >= n)):
        places = torch.tensor(
            [(row, at) for row, ids in enumerate(batch.rows) for at in range(len(ids)) if chosen(at, lengths[row])]
        )
        rows, tokens = places.unbind(1)
        target = torch.stack([given[row][at] for row, at in places.tolist()])
        baseline = float((rounded[rows, tokens].double() - exact[rows, tokens].double()).norm())
        observations.append(Observation(phase, target, baseline, places))
    entry = MappingEntry((path,), (path,), component_type="attention")
    return Case(source, (path,), entry, batch, feed, tuple(observations))


def _run(model: nn.Module, batch: TokenBatch, path: str) -> list[Tensor]:
    """Each row alone, its prompt and then token by token: the module's outputs, [tokens, features] a row."""
    found: list[list[Tensor]] = []

    def keep(_: nn.Module, args: object, out: Any) -> None:
        found[-1].append((out[0] if isinstance(out, tuple) else out)[0])

    handle = model.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        for ids, length in zip(batch.rows, batch.prompt_lengths, strict=True):
            found.append([])
            # a cache that keeps every token: a defect may let decode see any of them
            out = model(input_ids=torch.tensor(ids[:length])[None], past_key_values=DynamicCache(), use_cache=True)
            for token in ids[length:]:
                out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    handle.remove()
    return [torch.cat(parts) for parts in found]


def explained(root: Path, config: dict[str, Any], path: str, inject: Inject) -> Explanation:
    """What the search says of the defect, on two seeds."""
    cases = [case_of(model_folder(root, config, seed), path, inject, seed) for seed in (11, 12)]
    return explain(cases, Thresholds())


def low_cases(folder: Path, path: str, inject: Inject, seed: int) -> tuple[Case, Case]:
    """The module in bf16, fed by the fp32 source: what the defective model gives of it, and what fp32 gives."""
    batch = draw_batch(131, (20, 13), 1, seed)
    exact, low, port = (load_reference(folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))
    inject(port)
    feed = capture_reference(exact, batch, (path,))
    places = torch.tensor([(row, at) for row, length in enumerate(batch.prompt_lengths) for at in range(length)])
    rows, tokens = places.unbind(1)
    wide = feed.outputs[path][rows, tokens]
    rounded, given = (
        capture_reference(model, batch, (path,), feed=feed).outputs[path][rows, tokens] for model in (low, port)
    )
    baseline = float((rounded.double() - wide.double()).norm())
    entry = MappingEntry((path,), (path,), component_type="moe")
    first, second = (
        Case(model, (path,), entry, batch, feed, (Observation("prefill", value, baseline, places),))
        for model, value in ((low, given), (exact, wide))
    )
    return first, second
