"""What a port's own files say: classes and imports by AST, and the words of the README and config beside them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from equiport.stacks.source_reading import SourceFile, read_source

_README = "README.md"
_TYPE_STATED = re.compile(r"model_type[\"'`]?\s*(?:=|==|:)\s*[\"'`]([A-Za-z][\w.-]*)[\"'`]")
_IDENTIFIER = re.compile(r"architecture identifier\W+([a-z][a-z0-9_]+)", re.IGNORECASE)
_HF_CLASS = re.compile(r"(?<![\w.])(?!Neuron)([A-Z]\w*(?:ForCausalLM|ForConditionalGeneration|LMHeadModel))\b")
_LINE = re.compile(r"^\W*(Architecture|Model Type|HuggingFace IDs?)\W+(.*)$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class PortText:
    """`words` are the file's text and the README's; `lines` the README's information lines by lower-case heading."""

    source: SourceFile
    text: str
    readme: str
    lines: dict[str, str]

    @property
    def stated_types(self) -> frozenset[str]:
        """Every `model_type="x"` of the file and of the README."""
        return frozenset(_TYPE_STATED.findall(self.text)) | self.readme_types

    @property
    def readme_types(self) -> frozenset[str]:
        """Every `model_type="x"` of the README."""
        return frozenset(_TYPE_STATED.findall(self.readme) + _IDENTIFIER.findall(self.readme))

    def hf_classes(self, *, readme_only: bool = False) -> frozenset[str]:
        """Names of HuggingFace's classes that file and README mention, without those that the port itself defines."""
        text = self.readme if readme_only else f"{self.text}\n{self.readme}"
        return frozenset(_HF_CLASS.findall(text)) - set(self.source.classes)

    @property
    def from_transformers(self) -> frozenset[str]:
        """What the file imports from transformers, by original name."""
        return frozenset(
            imported.original
            for imported in self.source.imports.values()
            if imported.level == 0 and imported.module.partition(".")[0] == "transformers" and imported.original
        )

    @property
    def roots(self) -> frozenset[str]:
        """Top-level packages that the file imports anywhere."""
        return frozenset(module.partition(".")[0] for module, level in self.source.modules if level == 0 and module)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Classes that the file defines."""
        return tuple(self.source.classes)


def read_port_text(port: Path) -> PortText:
    """The texts of a port.

    Raises:
        EquiportError: the file is absent, unreadable or not Python.
    """
    source = read_source(port)
    readme = next((folder / _README for folder in _above(port) if (folder / _README).is_file()), None)
    words = readme.read_text(encoding="utf-8", errors="replace") if readme else ""
    lines: dict[str, str] = {}
    for heading, rest in _LINE.findall(words):
        lines.setdefault(heading.lower().replace("ids", "id"), rest)
    return PortText(source, port.read_text(encoding="utf-8"), words, lines)


def _above(port: Path) -> list[Path]:
    """The folder of the file, and the one above where the file's own is a source folder."""
    here = port.absolute().parent
    return [here, here.parent] if here.name in ("src", "source", "port") else [here]


def needed_modules(source: SourceFile) -> tuple[str, ...]:
    """Modules that importing the file needs, relative ones with their dots: not those under `try`, `if TYPE_CHECKING`
    or inside functions.
    """
    tree = ast.parse(source.path.read_text(encoding="utf-8"))
    found: dict[str, None] = {}
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            found.update(dict.fromkeys(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found["." * node.level + node.module] = None
        elif isinstance(node, ast.ClassDef):
            waiting += node.body
    return tuple(found)
