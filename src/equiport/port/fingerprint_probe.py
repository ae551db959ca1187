"""A small model of the same class, run once with every module's input and output kept: what facets are measured on.

Dimensions are tiny and distinct, the number of layers and their kinds are the model's own, weights are drawn so that
no parameter is constant. Facets are hypotheses that must reproduce these tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.fixtures.tiny_config import tiny_config
from equiport.fixtures.tiny_widths import WIDTH_KEYS
from equiport.fixtures.weights import WeightKind, draw_weights
from equiport.port.source_reading_model import SourceModel, build_config, build_model, first_line

TOKENS = 28  # more than the window (12) and the original positions (16) of a tiny config
_SEED = 7
_LIMIT = 60_000_000  # weights of the small model
_SOFTCAP, _FINAL_SOFTCAP, _CLIP, _WINDOW = 2.25, 3.25, 0.8, 12
# the tiny config shrinks layers too; here they stay, only the widths go
_KEPT = ("num_hidden_layers", "layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type",
         "mlp_only_layers", "moe_layers", "first_k_dense_replace", "max_window_layers")  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call of a module: its first tensor argument and its first tensor result."""

    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class Border:
    """Names, shapes and dtypes of the tensors of a module's first call."""

    inputs: tuple[tuple[str, tuple[int, ...], str], ...]
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Probe:
    """The small model after its run. Tensors are [1, T, ...] fp32."""

    model: nn.Module
    config: Any
    values: dict[str, Any]  # the small config.json
    tokens: Tensor  # [1, T]
    calls: Mapping[str, tuple[Call, ...]]
    borders: Mapping[str, Border]
    logits: Tensor

    def call(self, path: str) -> Call | None:
        """The first call of a module, None when it was not called."""
        return next(iter(self.calls.get(path, ())), None)

    def at(self, path: str) -> nn.Module:
        """The module at a path."""
        return self.model.get_submodule(path)


def small_values(source: SourceModel) -> dict[str, Any]:
    """The model's own config.json with tiny widths and all its layers.

    Raises:
        EquiportError: a dimension is missing.
    """
    full = {**_filled(source), **source.raw}
    standard = {key: name for name, key in source.renamed.items()}
    values = {standard.get(key, key): value for key, value in full.items() if value is not None}
    if isinstance(values.get("num_kv_heads"), int) and "num_key_value_heads" not in values:
        values["num_key_value_heads"] = values["num_kv_heads"]
    tiny = tiny_config(values).config
    for name in _KEPT:
        if name in values:
            tiny[name] = values[name]
    for name in ("n_group", "topk_group"):
        # one group: which experts are chosen does not matter to what is measured
        if isinstance(tiny.get(name), int):
            tiny[name] = 1
    for name, value in values.items():
        # constants that must bind at the small scale
        if "softcap" in name and isinstance(value, (int, float)):
            tiny[name] = _FINAL_SOFTCAP if "final" in name else _SOFTCAP
        elif "clip" in name and isinstance(value, float):
            tiny[name] = _CLIP
        elif name in ("window_size", "attention_chunk_size") and isinstance(value, int):
            tiny[name] = _WINDOW
    if "num_kv_heads" in tiny:
        tiny["num_kv_heads"] = tiny["num_key_value_heads"]
    if isinstance(tiny.get("rotary_dim"), int):
        tiny["rotary_dim"] = 8
    if isinstance(tiny.get("word_embed_proj_dim"), int) and values["word_embed_proj_dim"] == values["hidden_size"]:
        tiny["word_embed_proj_dim"] = tiny["hidden_size"]
    if isinstance(tiny.get("vocab_size"), int) and isinstance(tiny.get("pad_token_id"), int):
        tiny["pad_token_id"] = min(tiny["pad_token_id"], tiny["vocab_size"] - 1)
    _shrink_nested(tiny)
    back = source.renamed
    result = {back.get(key, key): value for key, value in tiny.items()}
    return {key: value for key, value in result.items() if key in full or key in source.raw}


def _shrink_nested(tiny: dict[str, Any]) -> None:
    """Key heads and clamps inside nested settings of the attention."""
    for name, nested in list(tiny.items()):
        if not isinstance(nested, dict):
            continue
        changed = dict(nested)
        for key, value in nested.items():
            if key == "kv_n_heads":
                changed[key] = tiny.get("num_key_value_heads") or 2
            elif "clip" in key and isinstance(value, (int, float)):
                changed[key] = _CLIP
        tiny[name] = changed


def _filled(source: SourceModel) -> dict[str, Any]:
    """The defaults of the config class for what config.json leaves out, without what is derived from widths."""
    filled = source.config.to_dict()
    standard = set(source.renamed.values()) | set(source.renamed)
    dims = {"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size",
            "num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_parameters", "no_rope_layers",
            "rope_scaling", "rope_theta", "model_type", "num_kv_heads"}  # fmt: skip
    keep = dims | standard | WIDTH_KEYS | set(_KEPT)
    raw = source.raw
    filled = {key: value for key, value in filled.items() if key in keep and key not in raw}
    if filled.get("head_dim") and "head_dim" not in raw:
        heads, hidden = getattr(source.config, "num_attention_heads", 0), getattr(source.config, "hidden_size", 0)
        # a head_dim that the class derives must be derived again at the small width
        if isinstance(heads, int) and isinstance(hidden, int) and filled["head_dim"] * heads == hidden:
            filled.pop("head_dim")
    if "rope_parameters" in filled and ("rope_theta" in raw or "rope_scaling" in raw):
        filled.pop("rope_parameters")
    return filled


def run_probe(source: SourceModel) -> Probe:
    """Build the small model, draw its weights, run it once on T tokens.

    Raises:
        EquiportError: it cannot be shrunk, built or run.
    """
    values = small_values(source)
    try:
        config = build_config(source, values)
    except Exception as error:
        raise EquiportError(f"a small config of the same class is refused: {first_line(error)}") from error
    size = sum(parameter.numel() for parameter in build_model(source, config, "meta").parameters())
    if size > _LIMIT:
        raise EquiportError(f"a small model of the same class would still hold {size:,} weights")
    torch.manual_seed(_SEED)
    model = build_model(source, config)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    tokens = torch.randint(3, int(config.vocab_size) - 1, (1, TOKENS), generator=torch.Generator().manual_seed(_SEED))
    try:
        model.load_state_dict(draw_weights(model.state_dict(), WeightKind.PERTURBED, _SEED, tied=tied))
        calls, borders, logits = _recorded(model, tokens)
    except Exception as error:
        raise EquiportError(f"the small model does not run: {type(error).__name__}: {first_line(error)}") from error
    return Probe(model, config, values, tokens, calls, borders, logits)


def _recorded(model: nn.Module, tokens: Tensor) -> tuple[dict[str, tuple[Call, ...]], dict[str, Border], Tensor]:
    borders: dict[str, Border] = {}
    calls: dict[str, list[Call]] = {}
    pending: dict[str, list[Tensor]] = {}

    def before(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = _first_tensor((*args, *kwargs.values()))
            # cloned before the module may write into it
            pending.setdefault(path, []).append(torch.empty(0) if value is None else value.detach().clone())

        return hook

    def after(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            borders.setdefault(path, Border(_named(_bound(module, args, kwargs)), _named([("", output)])))
            value = _first_tensor((output,))
            given = pending[path].pop()
            if value is not None:
                calls.setdefault(path, []).append(Call(given, value.detach().clone()))

        return hook

    handles = []
    for path, module in model.named_modules():
        if path:
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        with torch.no_grad():
            output = model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {path: tuple(found) for path, found in calls.items()}, borders, output.logits.detach()


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    try:
        return list(inspect.signature(module.forward).bind(*args, **kwargs).arguments.items())
    except (TypeError, ValueError):
        return [(f"arg{index}", value) for index, value in enumerate(args)] + list(kwargs.items())


def _named(values: list[tuple[str, Any]]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    found: list[tuple[str, tuple[int, ...], str]] = []
    for name, value in values:
        if isinstance(value, Tensor):
            found.append((name, tuple(value.shape), str(value.dtype).removeprefix("torch.")))
        elif isinstance(value, (tuple, list)):
            inner = [(f"{name}[{index}]" if name else f"[{index}]", item) for index, item in enumerate(value)]
            found += _named(inner)
        elif isinstance(value, dict):
            found += _named([(str(key) if name in ("", "kwargs") else f"{name}.{key}", value[key]) for key in value])
    return tuple(found)


def _first_tensor(values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (tuple, list)):
            found = _first_tensor(value)
            if found is not None:
                return found
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a small model are too small to share: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same(left: Tensor, right: Tensor, tolerance: float = 2e-5) -> bool:
    """Whether two tensors of one shape agree, relative to their size."""
    if left.shape != right.shape or not left.numel():
        return False
    left, right = left.detach().double(), right.detach().double()
    scale = float(right.detach().norm())
    return bool(torch.isfinite(left).all()) and float((left - right).norm()) <= tolerance * max(scale, 1e-12)


def factor_between(left: Tensor, right: Tensor) -> float | None:
    """c with left = c * right; None when there is none."""
    if left.shape != right.shape:
        return None
    left, right = left.double().flatten(), right.double().flatten()
    energy = float(right @ right)
    if energy == 0:
        return None
    factor = float(left @ right) / energy
    return factor if same(left, factor * right) else None
