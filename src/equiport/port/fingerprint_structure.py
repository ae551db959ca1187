"""Where things stand in a model: layers, mixers, feed-forward blocks, norms. Rules over modules, no table of names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from equiport.port.fingerprint import SourceNames
from equiport.port.fingerprint_norms import is_norm

_RECURRENT_PARAMETERS = {"A_log", "dt_bias", "time_decay", "time_first", "slope_rate", "recurrent_param", "time_faaaa"}
_RECURRENT_CLASS = re.compile(r"mamba|recurrent|rwkv|delta|lightning|shortconv|ssm|lstm|linearattention")
_ATTENTION = re.compile(r"attn|attention")
_EXPERTS = re.compile(r"experts?$|moe")


@dataclass(frozen=True)
class LayerParts:
    """The parts of one layer by attribute name; "" where there is none."""

    path: str
    attention: str
    recurrent: str
    mlp: str
    moe: bool
    inline_mlp: tuple[str, ...]  # projections that stand in the layer itself
    norms: tuple[str, ...]
    others: tuple[str, ...]  # modules with parameters of no known part

    def at(self, name: str) -> str:
        """Full path of a part."""
        return f"{self.path}.{name}" if name else self.path


@dataclass(frozen=True)
class Structure:
    """The whole model's parts."""

    names: SourceNames
    layers: tuple[LayerParts, ...]
    outside: tuple[str, ...]  # modules with parameters beside backbone, layers, head


def find_layers(model: nn.Module, config: Any) -> tuple[str, nn.ModuleList] | None:
    """The stack of decoder layers: the outermost ModuleList of as many layers as the config says."""
    wanted = getattr(config, "num_hidden_layers", None)
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(path, one) for path, one in lists if not any(path.startswith(other + ".") for other, _ in lists)]
    fitting = [(path, one) for path, one in outer if len(one) == wanted] or [
        (path, one) for path, one in outer if len(one) > 1
    ]
    if not fitting:
        return None
    return max(fitting, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def find_structure(model: nn.Module, config: Any, hidden: int) -> Structure | None:
    """Parts of a model. Norms are recognised by computing on a real model, by class name on the meta device."""
    found = find_layers(model, config)
    if found is None:
        return None
    layers_path, layers = found
    backbone = layers_path.rpartition(".")[0]
    parts = tuple(_parts(f"{layers_path}.{index}", layer, hidden) for index, layer in enumerate(layers))
    by_id = {id(module): path for path, module in model.named_modules()}
    embedding = by_id.get(id(_safe(model, "get_input_embeddings")), "")
    head = by_id.get(id(_safe(model, "get_output_embeddings")), "")
    root = model.get_submodule(backbone) if backbone else model
    prefix = f"{backbone}." if backbone else ""
    siblings = [(prefix + name, child) for name, child in root.named_children() if prefix + name != layers_path]
    norms = [path for path, child in siblings if _looks_norm(child, hidden)]
    rotary = [path for path, child in siblings if _has_frequencies(child)]
    length = values_of(config).get("max_position_embeddings")
    positions = [
        path
        for path, child in siblings
        if isinstance(child, nn.Embedding)
        and path not in (embedding, head)
        and isinstance(length, int)
        and 0 <= child.num_embeddings - length <= 2
    ]
    names = SourceNames(
        backbone, layers_path, embedding, norms[-1] if norms else "", head, rotary[0] if rotary else "",
        positions[0] if len(positions) == 1 else "", norms[0] if len(norms) == 2 else "",
    )  # fmt: skip
    known = {embedding, head, layers_path, *norms, *rotary, names.positions}
    tops = [(name, child) for name, child in model.named_children() if not _above(name, known | {backbone})]
    outside = tuple(
        f"{path} ({type(child).__name__})"
        for path, child in [*siblings, *tops]
        if path not in known and any(True for _ in child.parameters())
    )
    return Structure(names, parts, outside)


def values_of(config: Any) -> dict[str, Any]:
    """A config object's values by stored and by standard name."""
    values = dict(config.to_dict())
    for standard, stored in (getattr(type(config), "attribute_map", None) or {}).items():
        if stored in values:
            values.setdefault(standard, values[stored])
    return values


def is_recurrent(module: nn.Module, family: str = "") -> bool:
    """Whether a mixer keeps a recurrent or convolutional state: by its parameters, its convolutions, its class.

    `family` is the part of the class name that all of the model's classes share: it says nothing of this one.
    """
    own = {name.rpartition(".")[2] for name, _ in module.named_parameters()}
    own |= {name.rpartition(".")[2] for name, _ in module.named_buffers()}
    if own & _RECURRENT_PARAMETERS or any(isinstance(child, nn.Conv1d) for child in module.modules()):
        return True
    return bool(_RECURRENT_CLASS.search(type(module).__name__.removeprefix(family).lower()))


def has_experts(module: nn.Module) -> bool:
    """Whether a block holds experts: a list of equal blocks, or weights stacked to three dimensions."""
    for path, child in module.named_modules():
        name = path.rpartition(".")[2] or type(module).__name__
        if isinstance(child, nn.ModuleList) and len(child) > 1 and any(child[0].children()):
            return True
        if any(one.dim() >= 3 and one.shape[0] > 1 for one in child.parameters(recurse=False)):
            return True
        if path and _EXPERTS.search(name.lower()) and any(True for _ in child.parameters()):
            return True
    return False


def projections(module: nn.Module) -> dict[str, nn.Module]:
    """The matrix multiplications inside a block: path in the block -> leaf module with a two-dimensional weight."""
    return {
        path: child
        for path, child in module.named_modules()
        if path and not any(child.children()) and _is_projection(child)
    }


def out_features(module: nn.Module) -> int:
    """Output width of a projection, also of the transposed kind (weight [in, out])."""
    size = getattr(module, "out_features", None) or getattr(module, "nf", None)
    return int(size if size is not None else module.get_parameter("weight").shape[0])


def in_features(module: nn.Module) -> int:
    """Input width of a projection, also of the transposed kind (weight [in, out])."""
    size = getattr(module, "in_features", None)
    if size is None:
        rows, columns = module.get_parameter("weight").shape
        size = rows if hasattr(module, "nf") else columns
    return int(size)


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Embedding) or weight is None or getattr(weight, "dim", lambda: 0)() != 2:
        return False
    return isinstance(module, nn.Linear) or hasattr(module, "nf") or "linear" in type(module).__name__.lower()


def _parts(path: str, layer: nn.Module, hidden: int) -> LayerParts:
    attention = recurrent = mlp = ""
    moe = False
    inline, norms, others = [], [], []
    for name, child in layer.named_children():
        parameters = any(True for _ in child.parameters())
        word = f"{name} {type(child).__name__}".lower()
        if _looks_norm(child, hidden):
            norms.append(name)
        elif not parameters and not _ATTENTION.search(word):
            continue
        elif not recurrent and is_recurrent(child, _family(layer, child)):
            recurrent = name
        elif _ATTENTION.search(word) and any(child.children()) and not attention and "cross" not in word:
            attention = name
        elif _is_projection(child):
            inline.append(name)
        elif any(child.children()) and not mlp:
            mlp, moe = name, has_experts(child)
        elif parameters and any(child.children()) and not moe and has_experts(child):
            # a dense block beside an expert block: the experts decide
            others.append(mlp)
            mlp, moe = name, True
        elif parameters:
            others.append(name)
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    return LayerParts(path, attention, recurrent, mlp, moe, tuple(inline), tuple(norms), (*others, *own))


def _family(layer: nn.Module, child: nn.Module) -> str:
    return os.path.commonprefix([type(layer).__name__, type(child).__name__])


def _looks_norm(module: nn.Module, hidden: int) -> bool:
    parameters = list(module.parameters(recurse=False))
    if any(parameter.is_meta for parameter in parameters) or not parameters:
        named = "norm" in type(module).__name__.lower() and not any(module.children())
        return named and all(parameter.dim() <= 2 for parameter in parameters)
    return is_norm(module, hidden)


def _has_frequencies(module: nn.Module) -> bool:
    named = any("inv_freq" in name for name, _ in module.named_buffers())
    return named or "rotary" in type(module).__name__.lower()


def _above(name: str, paths: set[str]) -> bool:
    return any(path == name or path.startswith(name + ".") for path in paths if path)


def _safe(model: nn.Module, method: str) -> Any:
    try:
        return getattr(model, method)()
    except (AttributeError, NotImplementedError, TypeError):
        return None
