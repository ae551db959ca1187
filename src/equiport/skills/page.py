"""A Markdown page as the lint reads it: frontmatter, links, headings, code blocks and code spans, with line numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from equiport.errors import EquiportError

_FRONTMATTER = re.compile(r"\A---\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A fenced code block: its language, the further words of its info string, its text, the line of its first line."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int


@dataclass(frozen=True)
class Piece:
    """A link's target, or the text of a code span, and its line."""

    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """One page. `meta` is None without frontmatter; `meta_problem` says why frontmatter could not be read."""

    path: Path
    lines: int
    meta: dict[str, Any] | None = None
    meta_problem: str = ""
    links: tuple[Piece, ...] = ()
    spans: tuple[Piece, ...] = ()
    fences: tuple[Fence, ...] = ()
    anchors: frozenset[str] = field(default=frozenset())


def read_page(path: Path) -> Page:
    """Parse a page.

    Raises:
        EquiportError: the file is missing or no UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EquiportError(f"cannot be read: {error}", where=path, remedy="Restore the file.") from None
    meta, problem, body, offset = _frontmatter(text)
    links: list[Piece] = []
    spans: list[Piece] = []
    fences: list[Fence] = []
    anchors: set[str] = set()
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    for place, token in enumerate(tokens):
        line = (token.map[0] if token.map else 0) + offset + 1
        if token.type == "fence":
            language, *words = token.info.split() or [""]
            fences.append(Fence(language, tuple(words), token.content, line + 1))
        elif token.type == "inline":
            for inner in token.children or []:
                links += _links(inner, line)
                spans += [Piece(inner.content, line)] if inner.type == "code_inline" else []
            if tokens[place - 1].type == "heading_open":
                anchors.add(slug(token.content))
    return Page(
        path, len(text.splitlines()), meta, problem, tuple(links), tuple(spans), tuple(fences), frozenset(anchors)
    )


def _links(token: Token, line: int) -> list[Piece]:
    name = {"link_open": "href", "image": "src"}.get(token.type)
    target = token.attrGet(name) if name else None
    return [Piece(str(target), line)] if target else []


def _frontmatter(text: str) -> tuple[dict[str, Any] | None, str, str, int]:
    """Values, what is wrong with them, the text behind them, and how many lines they take."""
    match = _FRONTMATTER.match(text)
    if match is None:
        return None, "", text, 0
    body, offset = text[match.end() :], text[: match.end()].count("\n")
    try:
        value = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return {}, f"is no YAML: {' '.join(str(error).split())}", body, offset
    if not isinstance(value, dict):
        return {}, "holds no `key: value` pairs", body, offset
    return {str(key): item for key, item in value.items()}, "", body, offset


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def body_of(text: str) -> str:
    """A page's text without its frontmatter."""
    return _frontmatter(text)[2]
