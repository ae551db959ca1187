"""Evidence is bound to its inputs by their sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from equiport.errors import EquiportError
from equiport.stacks.source_reading import read_source

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


def sha256(path: Path) -> str:
    """The file's sha256, read in 4-MB pieces.

    Raises:
        EquiportError: the file is missing or unreadable.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while piece := stream.read(1 << 22):
                digest.update(piece)
    except OSError as error:
        raise EquiportError(f"cannot be read: {error.strerror}", where=path, remedy="Check the path.") from None
    return digest.hexdigest()


def model_files(folder: Path) -> list[Path]:
    """The files of a HF folder that decide what it computes: config, weights, index, tokenizer."""
    return sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})


def port_files(modeling_file: Path) -> list[Path]:
    """The modeling file, the Python files beside it, and the packages around it that it imports from."""
    found = {modeling_file, *modeling_file.parent.glob("*.py")}
    waiting, seen = [modeling_file], set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for imported in _imported(file):
            package = imported if imported.is_dir() else imported.parent
            near = package == modeling_file.parent or package in modeling_file.parent.parents
            files = {imported} if near and imported.is_file() else set() if near else set(package.rglob("*.py"))
            found |= files
            waiting += files
    return sorted(found)


def _imported(file: Path) -> set[Path]:
    """Files and packages near `file` that it imports; none where it does not parse, which running it will tell."""
    try:
        modules = read_source(file).modules
    except EquiportError:
        return set()
    found = set()
    for module, level in modules:
        base = file.parent
        for _ in range(max(level - 1, 0)):
            base = base.parent
        target = base.joinpath(*module.split(".")) if module else base
        if target.with_suffix(".py").is_file():
            found.add(target.with_suffix(".py"))
        elif module and target.is_dir():
            found.add(target)
    return found


def input_name(path: Path, root: Path | None) -> str:
    """How an input is called in a result: relative to `root` where it lies inside, else absolute."""
    absolute = path.resolve()
    if root is not None and absolute.is_relative_to(root.resolve()):
        return str(absolute.relative_to(root.resolve()))
    return str(absolute)


def hash_inputs(paths: Iterable[Path], root: Path | None) -> dict[str, str]:
    """Path -> sha256; paths inside `root` are written relative to it, others absolute."""
    return {input_name(path, root): sha256(path.resolve()) for path in paths}
