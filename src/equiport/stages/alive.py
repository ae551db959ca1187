"""The alive gate: nudge every tensor and every config key, and see whether both sides move alike; part of stage 1."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from equiport.compare.gates_consistency import Nudge
from equiport.errors import EquiportError
from equiport.fixtures.folder import read_config, tensor_headers, write_folder
from equiport.fixtures.tokens import TokenBatch, draw_batch, special_ids
from equiport.reference.filled_keys import FilledKeys
from equiport.reference.model import constants, load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.stacks.teacher_forcing import prefill_logits
from equiport.trace.whole import make_model, reference_logits

# both beyond a tiny model's window and original context
_PROMPTS = (24, 19)
_TENSOR_NOISE, _CONSTANT_NOISE, _FLOAT_FACTOR = 0.3, 0.3, 1.37
# names, sizes and what training alone reads
_NEVER = {
    "model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "vocab_size",
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout", "auto_map",
    "tie_word_embeddings", "max_position_embeddings", "original_max_position_embeddings", "rope_type", "type",
}  # fmt: skip
# counts of positions: how many there may be, not where something changes
_POSITIONS = {"n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length", "model_max_length",
              "context_length", "max_length"}  # fmt: skip
# a limit of so many tokens or more is out of the prompts' reach; nudged to what is well within it
_FAR, _WITHIN = 32, 8
_ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class _Change:
    """A config with one key changed wherever it stands."""

    name: str
    config: dict[str, Any]
    kind: str


@dataclass(frozen=True)
class _Sides:
    """Both sides before any nudge. `folder`: where nudged models are written; logits are [B, V] float32."""

    adapter: StackAdapter
    classes: PortClasses
    folder: Path
    config: dict[str, Any]
    state: dict[str, Tensor]
    batch: TokenBatch
    theirs: Tensor
    ours: Tensor

    def reference(self, config: dict[str, Any]) -> Tensor:
        write_folder(self.folder, config, self.state)
        return _reference(self.folder, self.batch)

    def port(self, config: dict[str, Any]) -> Tensor:
        """Made by the port's own route from a folder with this config."""
        write_folder(self.folder, config, self.state)
        model = make_model(self.adapter, self.classes, self.folder, self.batch.batch_size, self.batch.max_length)
        return _port(self.adapter, model, self.batch)


def nudge_all(
    adapter: StackAdapter,
    classes: PortClasses,
    folder: Path,
    seed: int,
    on_step: Callable[[str], None] = lambda _: None,
    *,
    published: Collection[str] | None = None,
) -> list[Nudge]:
    """Nudge each stored tensor and each config key of a tiny model; fp32 logits of both sides, by prefill.

    A key is tried on the port only where it moves the source: the others are no business of the logits. One that does
    not when it grows, and does when it is made small, is a limit beyond the prompts. A key is changed
    in config.json, as a user would, with what the config class fills from it left out, and the port is made by its own
    route. `published`: keys of the source's own config.json, where the folder's has more. Constants that
    are stored with the weights are left alone: training does not move them, and ports have them in their code.

    Raises:
        EquiportError: a model does not load, or the port does not run.
    """
    config, state = read_config(folder), _state(folder)
    batch = draw_batch(config["vocab_size"], _PROMPTS, 0, seed, special_ids(config))
    source = load_reference(folder, torch.float32)
    theirs, fixed = reference_logits(source, batch)[:, -1], set(constants(source))
    del source
    model = make_model(adapter, classes, folder, batch.batch_size, batch.max_length)
    ours = _port(adapter, model, batch)
    found = []
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="equiport-alive-") as work:
        nudged = Path(work) / "nudged"
        for name, tensor in state.items():
            if name in fixed or not tensor.is_floating_point():
                continue
            on_step(name)
            write_folder(nudged, config, {**state, name: _noised(tensor, generator)})
            adapter.load_weights(model, nudged, torch.float32)
            found.append(
                Nudge(
                    kind="tensor",
                    name=name,
                    reference=_moved(theirs, _reference(nudged, batch)),
                    target=_moved(ours, _port(adapter, model, batch)),
                )
            )
        sides = _Sides(adapter, classes, nudged, config, state, batch, theirs, ours)
        filled = FilledKeys(config, published)
        for change in _changes(config):
            on_step(change.name)
            nudge = _key(sides, change, filled) or _limit(sides, change.name, filled)
            if nudge is not None:
                found.append(nudge)
    return found


def _key(sides: _Sides, change: _Change, filled: FilledKeys) -> Nudge | None:
    """None where the source refuses the change (another shape) or does not move."""
    stale = {key.name: key.value for key in filled.stale(change.config)}
    alone = _without(change.config, stale)
    try:
        moved = _moved(sides.theirs, sides.reference(alone))
    except (EquiportError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):
        return None
    if not moved > 0:
        return None
    nudge = Nudge(kind=change.kind, name=change.name, reference=moved, target=None)
    try:
        # without the filled keys a port may take defaults: only the change of this key may count
        before = sides.port(_without(sides.config, stale)) if stale else sides.ours
        nudge = nudge.model_copy(update={"target": _moved(before, sides.port(alone))})
    except Exception as error:  # a port that refuses another config does read it
        note = f"refuses the changed config: {(str(error).splitlines() or [''])[0][:160]}"
        nudge = nudge.model_copy(update={"note": note})
    return _with_filled(sides, change, stale, nudge) if stale else nudge


def _limit(sides: _Sides, name: str, filled: FilledKeys) -> Nudge | None:
    """A key that does not move the source when it grows may be a limit that no prompt reaches: then a small one does.

    None where it is no limit: neither moves the source.
    """
    value, lowered = _first(sides.config, name), copy.deepcopy(sides.config)
    if name in _POSITIONS or name.endswith(("_id", "_ids", "_index")) or not _lower(lowered, name):
        return None
    nudge = _key(sides, _Change(name, lowered, "config limit"), filled)
    return nudge and nudge.model_copy(update={"limit": value})


def _lower(config: dict[str, Any], name: str) -> bool:
    found = False
    for key, value in config.items():
        if isinstance(value, dict):
            found = _lower(value, name) or found
        elif key == name and isinstance(value, int) and value >= _FAR:
            config[key], found = _WITHIN, True
    return found


def _with_filled(sides: _Sides, change: _Change, stale: dict[str, Any], nudge: Nudge) -> Nudge:
    """What the port does when the filled keys are changed along, as `save_pretrained` would write them.

    It decides where the port refuses a config without them: that is not yet to read the key.
    """
    try:
        target = _moved(sides.ours, sides.port({**change.config, **stale}))
    except Exception:  # no config to go by
        return nudge
    if nudge.target is None:
        return nudge.model_copy(update={"target": target})
    return nudge.model_copy(update={"filled": tuple(stale), "target_filled": target})


def _without(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _state(folder: Path) -> dict[str, Tensor]:
    files = {header.file for header in tensor_headers(folder)}
    return {name: tensor for file in sorted(files) for name, tensor in load_file(str(file)).items()}


def _reference(folder: Path, batch: TokenBatch) -> Tensor:
    return reference_logits(load_reference(folder, torch.float32), batch)[:, -1]


def _port(adapter: StackAdapter, model: nn.Module, batch: TokenBatch) -> Tensor:
    return prefill_logits(adapter, model, batch.rows, batch.prompt_lengths)


def _moved(before: Tensor, after: Tensor) -> float:
    """Relative change of logits [B, V]; NaN where they are not finite."""
    if before.shape != after.shape:
        return float("inf")
    return float((after.double() - before.double()).norm() / before.double().norm())


def _noised(tensor: Tensor, generator: torch.Generator) -> Tensor:
    spread = float(tensor.float().std()) if tensor.numel() > 1 else 0.0
    noise = torch.randn(tensor.shape, generator=generator)
    return (tensor.float() + noise * (_TENSOR_NOISE * spread or _CONSTANT_NOISE)).to(tensor.dtype)


def _changes(config: dict[str, Any]) -> Iterator[_Change]:
    """One change a leaf name: a key that stands twice (at the top and in the rope fields) is changed in both places."""
    for name in dict.fromkeys(_leaves(config)):
        changed = copy.deepcopy(config)
        if name not in _NEVER and _replace(changed, name):
            kind = "config switch" if isinstance(_first(config, name), (bool, str)) else "config key"
            yield _Change(name, changed, kind)


def _leaves(config: dict[str, Any]) -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name


def _first(config: dict[str, Any], name: str) -> Any:
    """The value of the leaf's first place."""
    for key, value in config.items():
        if key == name and not isinstance(value, dict):
            return value
        if isinstance(value, dict) and name in set(_leaves(value)):
            return _first(value, name)
    return None


def _replace(config: dict[str, Any], name: str) -> bool:
    found = False
    for key, value in config.items():
        if isinstance(value, dict):
            found = _replace(value, name) or found
        elif key == name:
            other = _other(value)
            if other is not None:
                config[key], found = other, True
    return found


def _other(value: Any) -> Any:
    """Another value of the same kind; None where there is no sensible one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + max(1, value // 3)
    if isinstance(value, float):
        return value * _FLOAT_FACTOR if value else None
    if isinstance(value, str) and value in _ACTIVATIONS:
        return next(one for one in _ACTIVATIONS if one != value)
    if (
        isinstance(value, list)
        and len(set(map(str, value))) > 1
        and all(not isinstance(one, (list, dict)) for one in value)
    ):
        return [value[-1], *value[:-1]]
    return None
