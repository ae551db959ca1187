"""How alike two classes are when names, comments and types are set aside; transformers' classes are read by path."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from equiport.audit.source import ParsedModule

_ALWAYS = ("llama",)
_MOST_FAMILIES = 8
_SHORT = 60


@dataclass(frozen=True)
class Likeness:
    """The most alike class of the source: its name, its file under transformers, and the share of alike code."""

    name: str
    file: str
    score: float


def similarity_limit(node: ast.ClassDef) -> float:
    """Short classes are alike by chance."""
    return 0.92 if sum(_shape(node).values()) < _SHORT else 0.8


def closest_source(module: ParsedModule, node: ast.ClassDef) -> Likeness | None:
    """The class of transformers, of the families that the work folder speaks of, that `node` is most like."""
    shape = _shape(node)
    best: Likeness | None = None
    if sum(shape.values()) < 25:
        return None
    for family in families(module):
        for name, file, other in _source_classes(family):
            score = _alike(shape, other)
            if best is None or score > best.score:
                best = Likeness(name, file, score)
    return best


def families(module: ParsedModule) -> tuple[str, ...]:
    """Model families of transformers that the work folder's imports, file names and class names speak of."""
    work = module.work
    modules = work.modules if work is not None else (module,)
    known = _families()
    found: list[str] = list(_ALWAYS)
    words: set[str] = set()
    for item in modules:
        words.update(part for names in item.imports.values() for name in names for part in name.split("."))
        words.update(item.path.stem.replace("modeling_", "").replace("_nxdi", "").split("test_")[-1:])
        words.update(node.name for node in item.classes)
    lowered = {word.lower().replace("_", "").removeprefix("neuron") for word in words}
    for family in known:
        plain = family.replace("_", "")
        if len(plain) > 2 and any(
            word == plain or (word.startswith(plain) and len(word) < len(plain) + 22) for word in lowered
        ):
            found.append(family)
    ordered = sorted(dict.fromkeys(found), key=lambda name: (name not in _ALWAYS, -len(name)))
    return tuple(ordered[:_MOST_FAMILIES])


@lru_cache(maxsize=1)
def package_root() -> Path | None:
    """The folder of the installed transformers, found without importing anything of it; None: not installed."""
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(places[0]) if places else None


def _root() -> Path | None:
    root = package_root()
    return root / "models" if root is not None else None


@lru_cache(maxsize=1)
def _families() -> tuple[str, ...]:
    root = _root()
    if root is None or not root.is_dir():
        return ()
    return tuple(sorted(path.name for path in root.iterdir() if (path / f"modeling_{path.name}.py").is_file()))


def imported_families(modules: Iterable[ParsedModule]) -> tuple[str, ...]:
    """Families whose files are imported by name: `transformers.models.<family>`."""
    found = {
        dotted.split(".")[2]
        for module in modules
        for names in module.imports.values()
        for dotted in names
        if dotted.startswith("transformers.models.") and dotted.count(".") > 2
    }
    return tuple(sorted(found & set(_families())))


@lru_cache(maxsize=32)
def _source_classes(family: str) -> tuple[tuple[str, str, Counter[str]], ...]:
    root = _root()
    file = root / family / f"modeling_{family}.py" if root else None
    if file is None or not file.is_file():
        return ()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    return tuple(
        (node.name, f"models/{family}/{file.name}", _shape(node))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in node.body)
    )


def _shape(node: ast.ClassDef) -> Counter[str]:
    """Every node with its parent's and children's kinds, operators and attribute-free: what renaming leaves alone."""
    found: Counter[str] = Counter()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        for statement in method.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            waiting: list[ast.AST] = [statement]
            while waiting:
                item = waiting.pop()
                children = [child for child in ast.iter_child_nodes(item) if not isinstance(child, ast.expr_context)]
                if not isinstance(item, (ast.Name, ast.Constant, ast.operator, ast.arg)):
                    kinds = ",".join(_kind(child) for child in children)
                    found[f"{_kind(item)}({kinds})"] += 1
                waiting += children
    return found


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return "Self"
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("torch", "nn", "F"):
        return f"torch.{node.attr}"
    return type(node).__name__


def _alike(one: Counter[str], other: Counter[str]) -> float:
    total = sum(one.values()) + sum(other.values())
    return 2 * sum((one & other).values()) / total if total else 0.0
