"""Contracts: what each source block takes and gives, from the run of the small model, in symbols."""

from __future__ import annotations

from equiport.port.fingerprint import BlockContract, SourceBlock, TensorSpec
from equiport.port.fingerprint_probe import TOKENS, Probe
from equiport.port.fingerprint_structure import values_of

_SYMBOLS = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def read_contracts(probe: Probe, blocks: tuple[SourceBlock, ...]) -> tuple[BlockContract, ...]:
    """One contract a block that was called. A size that no symbol stands for is given as a number, `n(tiny)`."""
    symbols = _symbols(probe)
    contracts = []
    for block in blocks:
        path = block.path.replace("{i}", "0")
        border = probe.borders.get(path)
        if border is None or (path and type(probe.at(path)).__name__ != block.cls):
            path = next(
                (
                    name
                    for name, module in probe.model.named_modules()
                    if name in probe.borders and _fits(name, block.path) and type(module).__name__ == block.cls
                ),
                "",
            )
            border = probe.borders.get(path)
        if border is not None:
            contracts.append(
                BlockContract(
                    block.path, block.cls,
                    tuple(_spec(name, shape, dtype, symbols) for name, shape, dtype in border.inputs),
                    tuple(_spec(name, shape, dtype, symbols) for name, shape, dtype in border.outputs),
                )
            )  # fmt: skip
    return tuple(contracts)


def _fits(name: str, pattern: str) -> bool:
    left, right = name.split("."), pattern.split(".")
    return len(left) == len(right) and all(b.startswith("{") or a == b for a, b in zip(left, right, strict=True))


def _symbols(probe: Probe) -> dict[int, str]:
    values = values_of(probe.config)
    values.setdefault("head_dim", None)
    if not values["head_dim"]:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    symbols: dict[int, str] = {}
    for name in _SYMBOLS:
        if isinstance(values.get(name), int):
            symbols.setdefault(values[name], name)
    heads, width = values["num_attention_heads"], values["head_dim"]
    symbols.setdefault(heads * width, "num_attention_heads*head_dim")
    kv = values.get("num_key_value_heads")
    if isinstance(kv, int):
        symbols.setdefault(kv * width, "num_key_value_heads*head_dim")
    return symbols


def _spec(name: str, shape: tuple[int, ...], dtype: str, symbols: dict[int, str]) -> TensorSpec:
    shown = []
    for place, size in enumerate(shape):
        if size == TOKENS:
            shown.append("T")
        elif size == 1:
            shown.append("B" if place == 0 else "1")
        elif size in symbols:
            shown.append(symbols[size])
        elif size == TOKENS * 2:
            shown.append("2T")
        else:
            shown.append(f"{size} (small model)")
    return TensorSpec(name or "output", tuple(shown), "activations" if dtype == "float32" else dtype)
