"""Python source as text: used imports, sorted; long calls, broken; top-level definitions, taken apart and merged."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from equiport.errors import EquiportError

LINE_LENGTH = 120
_MANY_BLANKS = re.compile(r"\n{4,}")
_BLANKS_INSIDE = re.compile(r"\n{3,}(?=[ ])")


@dataclass(frozen=True)
class Definition:
    """One top-level class, function or assignment with the comments above it."""

    name: str
    text: str


def tidy(body: str) -> str:
    """Blank lines as PEP 8 has them, no trailing spaces, no line over 120 that a call can be broken in."""
    text = "\n".join(line.rstrip() for line in body.strip("\n").splitlines())
    text = _BLANKS_INSIDE.sub("\n\n", _MANY_BLANKS.sub("\n\n\n", text))
    return "\n".join(part for line in text.splitlines() for part in _broken(line)) + "\n"


def _broken(line: str) -> list[str]:
    """A line as it is, or its outermost bracket's content on lines of its own."""
    if len(line) <= LINE_LENGTH:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    opened = _outermost(line)
    if opened is None or '"""' in line or line.lstrip().startswith("#"):
        return [line]
    start, end = opened
    inner, tail = line[start + 1 : end].strip(), line[end:]
    joined = f"{indent}    {inner}"
    if len(joined) <= LINE_LENGTH:
        return [line[: start + 1], joined, indent + tail]
    items = _split_items(inner)
    broken = [part for item in items for part in _broken(f"{indent}    {item},")]
    return [line[: start + 1], *broken, indent + tail]


def _outermost(line: str) -> tuple[int, int] | None:
    """The bracket that closes last in the line."""
    end = max(line.rfind(")"), line.rfind("]"))
    if end < 0:
        return None
    depth = 0
    for place in range(end, -1, -1):
        if line[place] in ")]}":
            depth += 1
        elif line[place] in "([{":
            depth -= 1
            if depth == 0:
                return place, end
    return None


def _split_items(inner: str) -> list[str]:
    items, depth, start = [], 0, 0
    for place, character in enumerate(inner):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append(inner[start:place].strip())
            start = place + 1
    return [item for item in [*items, inner[start:].strip()] if item]


def with_imports(docstring: str, imports: Iterable[str], body: str) -> str:
    """A module: docstring, the imports that `body` uses, `body`.

    Raises:
        EquiportError: the result is not Python.
    """
    body = tidy(body)
    try:
        tree = ast.parse(body)
    except SyntaxError as error:
        line = body.splitlines()[(error.lineno or 1) - 1].strip()
        raise EquiportError(
            f"the composed source is no Python: {error.msg}: {line}", field="templates", remedy="Correct the recipe."
        ) from error
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    head = [f'"""{docstring.strip()}\n"""' if "\n" in docstring.strip() else f'"""{docstring.strip()}"""']
    return "\n\n".join([*head, "from __future__ import annotations", import_lines(imports, used)]) + f"\n\n\n{body}"


def import_lines(imports: Iterable[str], used: set[str]) -> str:
    """Import statements merged, sorted and restricted to the names in `used`."""
    plain: set[str] = set()
    named: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse("\n".join(imports))):
        if isinstance(node, ast.Import):
            plain |= {alias.name for alias in node.names if alias.name.split(".")[0] in used}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names if alias.name in used}
            if names:
                named.setdefault(node.module, set()).update(names)
    groups = []
    for standard in (True, False):
        lines = [f"import {name}" for name in sorted(plain) if (name in sys.stdlib_module_names) is standard]
        for module in sorted(named, key=str.lower):
            if (module.split(".")[0] in sys.stdlib_module_names) is standard:
                lines += _from_import(module, named[module])
        if lines:
            groups.append("\n".join(lines))
    return "\n\n".join(groups)


def _from_import(module: str, names: set[str]) -> list[str]:
    ordered = sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[:1].isupper() else 2, name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= LINE_LENGTH:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in ordered), ")"]


def definitions(source: str) -> list[Definition]:
    """The top-level definitions of a module, each with the comment lines that stand right above it."""
    lines = source.splitlines()
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = node.name
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, first = node.targets[0].id, node.lineno - 1
        else:
            continue
        while first > 0 and lines[first - 1].startswith("#"):
            first -= 1
        found.append(Definition(name, "\n".join(lines[first : node.end_lineno])))
    return found


def imports_of(source: str) -> list[str]:
    """The import statements of a module, `from __future__` left out."""
    return [
        ast.unparse(node)
        for node in ast.parse(source).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__"
    ]


def merged(parts: Iterable[tuple[str, Iterable[Definition]]]) -> list[Definition]:
    """Definitions of several units in their order, each name once.

    Raises:
        EquiportError: two units define one name differently (both are named).
    """
    found: dict[str, tuple[str, Definition]] = {}
    for unit, definitions_of_unit in parts:
        for item in definitions_of_unit:
            if item.name not in found:
                found[item.name] = (unit, item)
            elif found[item.name][1].text != item.text:
                raise EquiportError(
                    f"units {found[item.name][0]} and {unit} define {item.name} differently",
                    field="units",
                    remedy="Give one of them another name, or the same text.",
                )
    return [item for _, item in found.values()]
