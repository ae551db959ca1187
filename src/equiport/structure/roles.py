"""What modules are for: framework scaffolding, wrappers, activations, rotary tables, and the component types."""

from __future__ import annotations

from torch import nn

from equiport.structure.mapping import MappingEntry

# without a counterpart in the source (seed 003: expected structural differences)
_FRAMEWORK = {
    "SPMDRank": "the stack's own rank tensor",
    "KVCacheManager": "the stack's own KV cache",
    "DataParallelKVCacheManager": "the stack's own KV cache",
    "ModuleList": "a container",
    "ParameterList": "a container",
    "Sampler": "on-device sampling",
    "ModuleMarkerStartWrapper": "a compiler marker",
    "ModuleMarkerEndWrapper": "a compiler marker",
    "Softmax": "the stack's softmax, inside the attention core",
}
_GROUPS = ("GroupQueryAttention_QKV", "GroupQueryAttention_O")
_ACTIVATIONS = ("silu", "gelu", "relu", "activation", "swish", "tanh", "xielu")
_TYPES = (
    ("lm_head", ("lm_head",)),
    ("rotary", ("rotary", "rope")),
    ("norm", ("norm",)),
    ("embedding", ("embed",)),
    ("attention_o", ("o_proj",)),
    ("attention_qkv", ("qkv", "q_proj", "k_proj", "v_proj")),
    ("linear", ("linear", "_proj")),
    ("mlp", ("mlp",)),
    ("attention", ("attn", "attention")),
    ("decoder_layer", ("layer", "block")),
)


def component_type(target: nn.Module, entry: MappingEntry) -> str:
    """The kind that thresholds and reports group by: norm, embedding, linear, rotary, mlp, attention, lm_head ..."""
    name = entry.target[0].split(".")[-1].lower()
    cls = type(target.get_submodule(entry.instances()[0][1][0])).__name__.lower()
    # the name first: a class may tell what it does besides (a normalized embedding)
    for words in (name, cls):
        for kind, marks in _TYPES:
            if any(mark in words for mark in marks):
                return kind
    return "decoder_layer" if name == "{i}" else "module"


def owns_parameters(module: nn.Module) -> bool:
    """Whether the module itself, not a child, holds parameters."""
    return any(True for _ in module.parameters(recurse=False))


def is_wrapper(module: nn.Module) -> bool:
    """A stack's wrapper or container without weights of its own: its children are mapped one by one."""
    return type(module).__name__ in (*_GROUPS, *_FRAMEWORK) and not owns_parameters(module)


def is_rotary(module: nn.Module) -> bool:
    """A module that makes rotary tables."""
    name = type(module).__name__.lower()
    return "rotary" in name or "rope" in name


def in_framework(target: nn.Module, tensor: str) -> bool:
    """Whether a parameter belongs to the stack's own scaffolding (ranks, KV cache), whose values are not weights."""
    parts = tensor.split(".")[:-1]
    owners = [target.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
    return any(type(owner).__name__ in _FRAMEWORK and owns_parameters(owner) for owner in owners)


def is_container(module: nn.Module, path: str, mapped: set[str]) -> bool:
    """A module without weights of its own that holds mapped modules."""
    return not owns_parameters(module) and any(name.startswith(path + ".") for name in mapped)


def is_weightless_part(module: nn.Module, path: str, mapped: set[str]) -> bool:
    """A module without any weights inside a mapped one: rotary tables of a source that computes them in place, ..."""
    around = any(path.startswith(name + ".") for name in mapped)
    return around and not any(True for _ in module.parameters())


def explanation(module: nn.Module) -> str:
    """Why a module needs no counterpart; empty if it does need one."""
    cls = type(module).__name__
    if cls in _FRAMEWORK:
        return f"{cls}: {_FRAMEWORK[cls]}"
    if any(mark in cls.lower() for mark in _ACTIVATIONS) and not owns_parameters(module):
        return f"{cls}: an activation without weights, tested inside its parent"
    if cls in ("Dropout", "Identity"):
        return f"{cls}: does nothing in eval mode"
    if cls in _GROUPS:
        return f"{cls}: the stack's wrapper; its projections are mapped one by one"
    return ""
