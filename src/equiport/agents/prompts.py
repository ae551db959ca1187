"""The prompts of agents: the pages of `agents/`, which an agent CLI reads as they stand. There is no second copy."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

from equiport.content import content_dir
from equiport.errors import EquiportError

_PAGE = re.compile(r"\A---\n(?P<head>.*?)\n---\n(?P<body>.*)\Z", re.DOTALL)


@dataclass(frozen=True)
class AgentPrompt:
    """One agent: its name, what it is for, the tools it has, and what it is told."""

    name: str
    description: str
    tools: tuple[str, ...]
    text: str


def load_prompt(name: str) -> AgentPrompt:
    """The page `agents/<name>.md`.

    Raises:
        EquiportError: no such page, or one that an agent CLI would drop without a word (no name, no description), or
            whose tools are not listed.
    """
    path = content_dir("agents") / f"{name}.md"
    try:
        found = _PAGE.match(path.read_text(encoding="utf-8"))
    except OSError:
        raise EquiportError("no such agent", where=path, remedy="Reinstall equiport.") from None
    head = None
    if found:
        try:
            head = yaml.safe_load(found["head"])
        except yaml.YAMLError as error:
            raise EquiportError(f"its head is no YAML: {error}", where=path, remedy="Correct the page.") from None
    if found is None or not isinstance(head, dict):
        raise EquiportError("has no head between two lines of ---", where=path, remedy="Correct the page.")
    for field in ("name", "description", "tools"):
        if not isinstance(head.get(field), str) or not head[field].strip():
            raise EquiportError("is missing", where=path, field=field, remedy="Correct the page.")
    if head["name"] != name:
        raise EquiportError(f"is {head['name']!r}", where=path, field="name", remedy="Name it like its file.")
    tools = tuple(part.strip() for part in head["tools"].split(",") if part.strip())
    return AgentPrompt(name, " ".join(head["description"].split()), tools, found["body"].strip() + "\n")
