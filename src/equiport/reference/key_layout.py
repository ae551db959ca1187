"""Under which names the tensors of one model are stored: as `save_pretrained` does, without the backbone's prefix, or
as a part of a checkpoint of several parts.

Published checkpoints come in all three, transformers loads the first two as the same model, and the conversion of a
port reads one of them. Weights that are drawn here follow the folder they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.experiment.atomic import write_json
from equiport.fixtures.folder import has_weights, tensor_headers

#: In a folder with a config alone: the layout that weights drawn for it have.
LAYOUT_FILE = "key_layout.json"


class KeyLayout(BaseModel):
    """`dropped`: prefix of the backbone that stored names lack; `added`: one that all of them bear. Both with a dot."""

    dropped: str = ""
    added: str = ""

    @property
    def is_plain(self) -> bool:
        """As `save_pretrained` writes them."""
        return not (self.dropped or self.added)

    def stored(self, name: str) -> str:
        """The stored name of what `save_pretrained` calls `name`."""
        return self.added + name.removeprefix(self.dropped)

    def words(self) -> str:
        """What a report says of it; "" for the plain one."""
        if self.added:
            return (
                f"stored names bear the prefix {self.added}, as in a checkpoint of several parts; the source lacks it"
            )
        if self.dropped:
            return f"stored names lack the prefix {self.dropped}; transformers loads them as the same model"
        return ""


def backbone_prefix(model: nn.Module) -> str:
    """The prefix of the backbone's names, with a dot; "" where the model has none."""
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    return f"{prefix}." if prefix and hasattr(model, prefix) else ""


def layout_of(stored: Collection[str], model: nn.Module) -> KeyLayout:
    """The layout of these stored names of `model` (the source, possibly on the meta device)."""
    own, prefix = set(model.state_dict()), backbone_prefix(model)
    added = _added(stored, own | {name.removeprefix(prefix) for name in own})
    names = [name.removeprefix(added) for name in stored]
    bare = bool(prefix) and not any(name.startswith(prefix) for name in names)
    found = bare and any(prefix + name in own for name in names)
    return KeyLayout(dropped=prefix if found else "", added=added)


def _added(stored: Collection[str], known: Collection[str]) -> str:
    """The prefix that every stored name bears before a name that the model knows."""
    first = min(stored, default="")
    steps = first.split(".")
    for count in range(1, len(steps)):
        prefix = ".".join(steps[:count]) + "."
        if all(name.startswith(prefix) for name in stored):
            if first not in known and all(name.removeprefix(prefix) in known for name in stored):
                return prefix
        else:
            break
    return ""


def declare_layout(folder: Path, layout: KeyLayout) -> None:
    """Say in a folder with a config alone how weights drawn for it are to be stored."""
    (folder / LAYOUT_FILE).unlink(missing_ok=True)
    if not layout.is_plain:
        write_json(folder / LAYOUT_FILE, layout)


def layout_for(source: Path, model: nn.Module) -> KeyLayout:
    """The layout of weights drawn for `source`: that of its own weights, or the one that its config stands with.

    Raises:
        EquiportError: what is declared there is no layout.
    """
    if has_weights(source):
        return layout_of([header.name for header in tensor_headers(source)], model)
    file = source / LAYOUT_FILE
    if not file.is_file():
        return KeyLayout()
    try:
        return KeyLayout.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as fault:
        raise EquiportError("is no layout of keys", where=file, remedy="Delete the file.") from fault


def store_as(folder: Path, layout: KeyLayout) -> None:
    """Rename the stored tensors of a folder that `save_pretrained` has written, in one file."""
    files = sorted(folder.glob("*.safetensors"))
    state = {layout.stored(name): value for file in files for name, value in load_file(str(file)).items()}
    for file in (*files, folder / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})


def part_of_whole(folder: Path, model: nn.Module) -> dict[str, Tensor] | None:
    """The folder's tensors under the names of `model`, where all of them bear a prefix that it does not know.

    transformers has no loading of its own for these (`key_mapping` is of no use before 5.0).
    """
    headers = tensor_headers(folder)
    added = _added([header.name for header in headers], set(model.state_dict()))
    if not added:
        return None
    files = sorted({header.file for header in headers})
    return {name.removeprefix(added): value for file in files for name, value in load_file(str(file)).items()}


def check_same(drawn: nn.Module, loaded: nn.Module, folder: Path) -> None:
    """That a folder gives the model that it was made from, tensor by tensor.

    Raises:
        EquiportError: a tensor is another one: the layout is not one that transformers loads.
    """
    theirs = loaded.state_dict()
    for name, tensor in drawn.state_dict().items():
        if name not in theirs or not torch.equal(tensor.float(), theirs[name].float()):
            raise EquiportError(
                f"in the layout that the port reads, transformers loads another {name}",
                where=folder,
                remedy="Give a model folder with weights.",
            )
