"""Weight provenance: which source tensors a target tensor was made of, found by value and not by name.

The port's own conversion is run on folders whose tensors hold tags instead of weights: once the tensor's identity,
once each element's row, once its column. What arrives in the port's parameters tells where every element came from,
through renames, fusions, splits, transposes, replications and ties alike. Where a conversion casts to bf16, tags are
sent again, a digit at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equiport.fixtures.folder import TensorHeader, fill_like, read_config, tensor_headers, write_folder
from equiport.stacks.contract import LoadReport, StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.structure.rounded_tags import WITNESS, combined, digit, digits, is_rounded

# an identity tag is _STEP * n + _MARK: arithmetic on it (norm + 1, a multiplier) breaks the residue and shows
_STEP, _MARK = 1024, 37


class Origin(str, Enum):
    """How a target tensor came to be."""

    COPIED = "copied"
    TRANSPOSED = "transposed"
    FUSED = "fused"
    ROWS = "rows rearranged"
    ELEMENTS = "elements rearranged"
    ALTERED = "copied, some elements changed"
    COMPUTED = "computed"
    CONSTANT = "not from the weights"


@dataclass(frozen=True)
class TensorProvenance:
    """The origin of one target tensor.

    `sources` in order of first appearance along dim 0. `row_map`: for each row of a tensor whose rows are whole rows
    of sources, (index into `sources`, source row); None otherwise. `column_map`: for each row of a tensor whose rows
    are whole columns of one source (a transposed weight, or a part of one), that column.
    """

    target: str
    origin: Origin
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    row_map: tuple[tuple[int, int], ...] | None = None
    note: str = ""
    column_map: tuple[int, ...] | None = None

    def describe(self) -> str:
        """One line for the mapping's reasoning."""
        names = ", ".join(self.sources)
        note = f" ({self.note})" if self.note else ""
        return f"{self.target}: {self.origin.value}" + (f" from {names}" if names else "") + note


@dataclass(frozen=True)
class Provenance:
    """Origins of all target tensors, and the source tensors that arrived nowhere."""

    tensors: tuple[TensorProvenance, ...]
    unconsumed: tuple[str, ...]
    load: LoadReport

    def of(self, target: str) -> TensorProvenance | None:
        """The origin of one target tensor."""
        return next((tensor for tensor in self.tensors if tensor.target == target), None)

    def loaded(self, names: Mapping[str, str]) -> Provenance:
        """The same with sources named as in the loaded model; `unconsumed` keeps the names of the checkpoint."""
        tensors = (replace(one, sources=tuple(names.get(name, name) for name in one.sources)) for one in self.tensors)
        return replace(self, tensors=tuple(tensors))


def trace_provenance(
    adapter: StackAdapter,
    port_file: Path,
    classes: PortClasses,
    folder: Path,
    on_step: Callable[[str], None] = lambda _: None,
) -> Provenance:
    """Run the port's conversion on tagged copies of `folder` (an HF folder with safetensors) and decode the tags.

    Writes three folders of the model's fp32 size into a temporary directory, one at a time.

    Raises:
        EquiportError: the port or its conversion fails.
    """
    names = [header.name for header in tensor_headers(folder)]
    passes = _Passes(adapter, port_file, classes, folder, names, on_step)
    arrived = passes.first()
    tensors = [
        _decode(name, arrived.identity[name], arrived.row[name], arrived.column[name], names)
        for name in sorted(arrived.identity)
    ]
    rounded = [one.target for one in tensors if one.origin is Origin.COMPUTED and arrived.rounded(one.target)]
    if rounded:
        again = passes.by_digits(rounded)
        tensors = [_unrounded(one, again, names) if one.target in rounded else one for one in tensors]
    # a buffer of the port's own making is no weight; one that holds a stored tensor is
    tensors = [tensor for tensor in tensors if tensor.target not in arrived.buffers or tensor.sources]
    if any(tensor.origin is Origin.COMPUTED for tensor in tensors):
        reverse = passes.reversed_identity()
        tensors = [
            _solve_affine(tensor, arrived, reverse[tensor.target], names)
            if tensor.origin is Origin.COMPUTED
            else tensor
            for tensor in tensors
        ]
    used = {source for tensor in tensors for source in tensor.sources}
    return Provenance(tuple(tensors), tuple(name for name in names if name not in used), arrived.load)


@dataclass(frozen=True)
class _Arrived:
    """What the port's parameters and stored buffers held after each pass; the names of the buffers."""

    identity: dict[str, Tensor]
    row: dict[str, Tensor]
    column: dict[str, Tensor]
    buffers: frozenset[str]
    load: LoadReport

    def rounded(self, name: str) -> bool:
        """Whether all that arrived in it is bf16."""
        return all(is_rounded(part[name]) for part in (self.identity, self.row, self.column))


@dataclass(frozen=True)
class _Digits:
    """Identity, row and column of rounded tensors, put together of digits; identity as a tag, or -1."""

    identity: dict[str, Tensor]
    row: dict[str, Tensor]
    column: dict[str, Tensor]


@dataclass(frozen=True)
class _Held:
    """What the port held after one pass."""

    tensors: dict[str, Tensor]
    buffers: frozenset[str]
    load: LoadReport


@dataclass(frozen=True)
class _Passes:
    """Runs of the conversion on tagged folders."""

    adapter: StackAdapter
    port_file: Path
    classes: PortClasses
    folder: Path
    names: list[str]
    on_step: Callable[[str], None]

    def first(self) -> _Arrived:
        """Identity, row and column."""
        number = {name: index + 1 for index, name in enumerate(self.names)}
        identity = self._run("identity", lambda header: torch.full(header.shape, _tag(number[header.name])))
        row = self._run("row", lambda header: _index_along(header.shape, rows=True))
        column = self._run("column", lambda header: _index_along(header.shape, rows=False))
        return _Arrived(identity.tensors, row.tensors, column.tensors, identity.buffers, identity.load)

    def reversed_identity(self) -> dict[str, Tensor]:
        """Identity tags counted from the other end: with the first ones they solve target = a * source + b."""
        number = {name: len(self.names) - index for index, name in enumerate(self.names)}
        return self._run(
            "identity reversed", lambda header: torch.full(header.shape, _tag(number[header.name]))
        ).tensors

    def by_digits(self, targets: list[str]) -> _Digits:
        """Identity, row and column once more for these tensors, by tags that a cast to bf16 leaves alone."""
        number = {name: index + 1 for index, name in enumerate(self.names)}
        shapes = [header.shape for header in tensor_headers(self.folder)]
        height = max((shape[0] for shape in shapes if shape), default=1)
        width = max((int(np.prod(shape[1:], dtype=np.int64)) for shape in shapes if shape), default=1)
        witness = self._run("witness", lambda header: torch.full(header.shape, WITNESS)).tensors

        def sent(label: str, of: Callable[[TensorHeader], Tensor], largest: int) -> dict[str, Tensor]:
            def send(place: int) -> dict[str, Tensor]:
                return self._run(f"{label}, digit {place}", lambda header: digit(of(header), place)).tensors

            return combined(send, digits(largest), targets, witness)

        numbers = sent("identity", lambda header: torch.full(header.shape, float(number[header.name])), len(number))
        row = sent("row", lambda header: _index_along(header.shape, rows=True), height - 1)
        column = sent("column", lambda header: _index_along(header.shape, rows=False), width - 1)
        whole = {name: (value > 0) & (row[name] >= 0) & (column[name] >= 0) for name, value in numbers.items()}
        tags = {name: torch.where(whole[name], value * _STEP + _MARK, -1.0) for name, value in numbers.items()}
        return _Digits(tags, row, column)

    def _run(self, label: str, tag: Callable[[TensorHeader], Tensor]) -> _Held:
        self.on_step(f"tagging {label}")
        return _through_conversion(self.adapter, self.port_file, self.classes, self.folder, tag)


def _tag(number: int) -> float:
    return float(_STEP * number + _MARK)


def _index_along(shape: tuple[int, ...], *, rows: bool) -> Tensor:
    if not shape:
        return torch.zeros(shape)
    height = shape[0]
    width = int(np.prod(shape[1:], dtype=np.int64))
    if rows:
        return torch.arange(height, dtype=torch.float32)[:, None].expand(height, width).reshape(shape).contiguous()
    return torch.arange(width, dtype=torch.float32)[None].expand(height, width).reshape(shape).contiguous()


def _through_conversion(
    adapter: StackAdapter,
    port_file: Path,
    classes: PortClasses,
    folder: Path,
    tag: Callable[[TensorHeader], Tensor],
) -> _Held:
    work = Path(tempfile.mkdtemp(prefix="equiport-provenance-"))
    try:
        tagged = write_folder(work / "model", read_config(folder), fill_like(folder, tag))
        for extra in ("generation_config.json",):
            if (folder / extra).is_file():
                shutil.copy(folder / extra, tagged / extra)
        model = adapter.create_model(
            port_file, classes.causal or classes.inner, classes.config, tagged, dtype=torch.float32
        )
        report = adapter.load_weights(model, tagged, torch.float32)
        inner = adapter.inner_model(model)
        parameters = dict(inner.named_parameters(remove_duplicate=False))
        stored = inner.state_dict()
        buffers = {name: value for name, value in inner.named_buffers() if name in stored and value.is_floating_point()}
        state = {name: value.detach().float().clone() for name, value in {**parameters, **buffers}.items()}
        return _Held(state, frozenset(buffers), report)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _decode(name: str, identity: Tensor, row: Tensor, column: Tensor, names: list[str]) -> TensorProvenance:
    shape = tuple(identity.shape)
    if torch.equal(identity, row) and torch.equal(identity, column):
        return TensorProvenance(name, Origin.CONSTANT, (), shape)
    numbers = (identity.double().numpy().reshape(-1) - _MARK) / _STEP
    valid = (numbers == np.round(numbers)) & (numbers >= 1) & (numbers <= len(names))
    if valid.sum() * 2 < valid.size:
        return TensorProvenance(name, Origin.COMPUTED, (), shape)
    order = np.where(valid, numbers, 0).astype(np.int64) - 1
    first_seen = np.sort(np.unique(order[valid], return_index=True)[1])
    present = list(dict.fromkeys(order[valid][first_seen].tolist()))
    sources = tuple(names[index] for index in present)
    if not valid.all():
        note = f"{int((~valid).sum())} of {valid.size} elements are no copies"
        return TensorProvenance(name, Origin.ALTERED, sources, shape, note=note)
    rows = row.long().numpy().reshape(shape)
    columns = column.long().numpy().reshape(shape)
    row_map = _row_map(order.reshape(shape), rows, columns, present)
    column_map = _column_map(rows, columns) if row_map is None and len(present) == 1 else None
    origin = _origin(row_map, rows, columns, len(present))
    return TensorProvenance(name, origin, sources, shape, row_map, column_map=column_map)


def _unrounded(tensor: TensorProvenance, again: _Digits, names: list[str]) -> TensorProvenance:
    """What the digits say of it; left alone where they say nothing."""
    name = tensor.target
    found = _decode(name, again.identity[name], again.row[name], again.column[name], names)
    if not found.sources:
        return tensor
    return replace(found, note="; ".join(text for text in (found.note, "rounded to bf16") if text))


def _solve_affine(tensor: TensorProvenance, arrived: _Arrived, again: Tensor, names: list[str]) -> TensorProvenance:
    """Find n, a, b with target = a * source_n + b, alike for all elements; else leave the tensor alone.

    b is what arrives where a tag is 0 (row 0 of the row pass); then the two identity passes give n and a.
    """
    first, second = arrived.identity[tensor.target].double().flatten(), again.double().flatten()
    if not bool((first == first[0]).all()) or not bool((second == second[0]).all()):
        return tensor
    offset = float(arrived.row[tensor.target].double().flatten()[0])
    one, two = float(first[0]) - offset, float(second[0]) - offset
    for index, name in enumerate(names):
        forward, backward = _tag(index + 1), _tag(len(names) - index)
        if one and abs(one * backward - two * forward) <= 1e-5 * abs(one * backward):
            note = f"x -> {one / forward:.6g} * x + {offset:.6g}"
            return TensorProvenance(tensor.target, Origin.COMPUTED, (name,), tensor.shape, note=note)
    return tensor


def _row_map(
    order: np.ndarray, rows: np.ndarray, columns: np.ndarray, present: list[int]
) -> tuple[tuple[int, int], ...] | None:
    height = order.shape[0] if order.ndim else 1
    flat_order, flat_rows, flat_columns = (array.reshape(height, -1) for array in (order, rows, columns))
    whole = (
        (flat_order == flat_order[:, :1]).all()
        and (flat_rows == flat_rows[:, :1]).all()
        and (flat_columns == np.arange(flat_columns.shape[1])[None]).all()
    )
    if not whole:
        return None
    place = {number: index for index, number in enumerate(present)}
    return tuple(
        (place[int(source)], int(source_row))
        for source, source_row in zip(flat_order[:, 0], flat_rows[:, 0], strict=True)
    )


def _column_map(rows: np.ndarray, columns: np.ndarray) -> tuple[int, ...] | None:
    """Which column of the source each row is, when every row is a whole one."""
    if rows.ndim != 2 or not (rows == np.arange(rows.shape[1])[None]).all() or not (columns == columns[:, :1]).all():
        return None
    return tuple(int(column) for column in columns[:, 0])


def _origin(row_map: tuple[tuple[int, int], ...] | None, rows: np.ndarray, columns: np.ndarray, count: int) -> Origin:
    if row_map is not None:
        if count > 1:
            return Origin.FUSED
        return Origin.COPIED if [row for _, row in row_map] == list(range(len(row_map))) else Origin.ROWS
    transposed = (
        rows.ndim == 2
        and count == 1
        and (rows == np.arange(rows.shape[1])[None]).all()
        and (columns == np.arange(rows.shape[0])[:, None]).all()
    )
    return Origin.TRANSPOSED if transposed else Origin.ELEMENTS
