"""Which file goes where for each agent CLI, and what is changed in it on the way.

`claude`: DEST (default `.claude`) holds `skills/<name>/SKILL.md` and `agents/<name>.md`, as the repository does.
`kiro`: DEST (default `.kiro`) holds `skills/<name>/SKILL.md`; an agent is `agents/<name>.json` whose prompt is a file
beside it. References, which no CLI loads by itself, go to `equiport/references`. Source: their public documentation.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from equiport.errors import EquiportError
from equiport.skills.lint import PLUGIN_ROOT
from equiport.skills.page import body_of, read_page

KINDS = ("claude", "kiro")
OWN = "equiport"  # our folder inside DEST
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
# tools of agent pages -> Kiro's names for them
_KIRO_TOOLS = {
    "Read": "read", "Write": "write", "Edit": "write", "Bash": "shell", "Grep": "grep", "Glob": "glob",
    "Agent": "subagent",
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One file to install: its place relative to DEST, and its bytes."""

    target: str
    data: bytes


def default_destination(kind: str) -> Path:
    """`.claude` or `.kiro`, in the current folder."""
    return Path(f".{_checked(kind)}")


def items(kind: str, root: Path, destination: Path) -> tuple[Item, ...]:
    """Every file of an installation, from the content folders below `root`, in the order of their names.

    Raises:
        EquiportError: an unknown kind, a missing content folder, or an agent page without frontmatter.
    """
    places = _places(_checked(kind), root)
    found = []
    for source, target in sorted(places.items(), key=lambda pair: pair[1]):
        if source.suffix != ".md":
            found.append(Item(target, source.read_bytes()))
            continue
        text = _rewritten(source, target, places, root)
        if kind == "kiro" and source.parent == root / "agents":
            found += _kiro_agent(source, text, target, destination)
        else:
            found.append(Item(target, text.encode()))
    return tuple(sorted(found, key=lambda item: item.target))


def _checked(kind: str) -> str:
    if kind not in KINDS:
        raise EquiportError(f"no agent CLI {kind!r}", field="KIND", remedy=f"Give one of {', '.join(KINDS)}.")
    return kind


def _places(kind: str, root: Path) -> dict[Path, str]:
    """Source file -> its place below DEST (for an agent of Kiro: that of its prompt)."""
    agents = "agents/prompts" if kind == "kiro" else "agents"
    heads = {"skills": "skills", "agents": agents, "references": f"{OWN}/references"}
    places: dict[Path, str] = {}
    for folder, head in heads.items():
        files = [path for path in sorted((root / folder).rglob("*")) if _ships(path)]
        if not files:
            raise EquiportError(f"content folder {folder!r} is missing", where=root, remedy="Reinstall equiport.")
        places |= {path: f"{head}/{path.relative_to(root / folder).as_posix()}" for path in files}
    return places


def _ships(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and "__pycache__" not in path.parts


def _rewritten(source: Path, target: str, places: dict[Path, str], root: Path) -> str:
    """Links lead to where the files are now; the plugin's root becomes the folder that holds scripts and templates."""
    resolved = {path.resolve(): place for path, place in places.items()}

    def moved(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        place = resolved.get(path)
        new = str(path) if place is None else os.path.relpath(place, PurePosixPath(target).parent)
        return PurePosixPath(new).as_posix() + (match[2] or "")

    text = source.read_text(encoding="utf-8")
    return _LINK.sub(moved, text).replace(PLUGIN_ROOT, str(root))


def _kiro_agent(source: Path, text: str, target: str, destination: Path) -> list[Item]:
    page = read_page(source)
    if not page.meta:
        raise EquiportError("has no frontmatter", where=source, remedy="equiport skills lint says more.")
    tools = page.meta.get("tools", [])
    named = [name.strip() for name in tools.split(",")] if isinstance(tools, str) else list(tools)
    agent = {
        "name": page.meta.get("name"),
        "description": page.meta.get("description"),
        "prompt": f"file://./prompts/{source.name}",
        "tools": list(dict.fromkeys(_KIRO_TOOLS.get(name, name) for name in named)),
        "resources": [f"skill://{destination.as_posix()}/skills/**/SKILL.md"],
    }
    return [
        Item(f"agents/{source.stem}.json", (json.dumps(agent, indent=2, ensure_ascii=False) + "\n").encode()),
        Item(target, body_of(text).encode()),
    ]
