"""The lint of skills, agents and references: what an agent CLI would not load, and what a reader could not follow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equiport import __version__
from equiport.errors import EquiportError
from equiport.skills.command_line import CommandTable, invocations, problem_of
from equiport.skills.page import Page, read_page

SKILL_FILE = "SKILL.md"
SKILL_LINES = 200  # a skill's page stays below
PAGE_LINES = 320  # every other page
PLUGIN_ROOT = "${CLAUDE_PLUGIN_ROOT}"
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_SKILL_KEYS = {"name", "description", "license", "compatibility", "metadata"}
_AGENT_KEYS = {"name", "description", "tools", "model", "skills", "color"}
_OWN_PATH = re.compile(r"(?:skills|agents|references|scripts|templates|examples|adapters)/[\w./-]*\w\.\w+")
_CODE = {"python", "json", "yaml"}


@dataclass(frozen=True)
class Problem:
    """One thing to mend: where (relative to the root), which rule, what."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True)
class LintReport:
    """What was looked at, and what is wrong."""

    skills: tuple[str, ...]
    agents: tuple[str, ...]
    pages: int
    commands: int
    problems: tuple[Problem, ...]


def lint(root: Path, table: CommandTable) -> LintReport:
    """Lint `root`/skills, agents, references and .claude-plugin against the commands that exist.

    Raises:
        EquiportError: there is no skills folder, or a page that cannot be read.
    """
    if not (root / "skills").is_dir():
        raise EquiportError("has no folder skills/", where=root, remedy="Give the root of a plugin.")
    scripts = frozenset(name[0] for name in table if name[0].endswith(".py"))
    pages = {path: read_page(path) for path in _paths(root)}
    skills = sorted(folder for folder in (root / "skills").iterdir() if folder.is_dir())
    agents = sorted((root / "agents").glob("*.md"))
    problems = [*_plugin(root)]
    commands = 0
    for folder in skills:
        problems += _skill(root, folder, pages)
    for path in agents:
        problems += _agent(root, pages[path])
    for path, page in pages.items():
        name = _name(root, path)
        problems += _size(name, page) + _links(root, page, pages) + _paths_named(root, page) + _code(name, page)
        for found in invocations(page, scripts):
            commands += 1
            wrong = problem_of(found, table)
            problems += [Problem(name, found.line, "command", wrong)] if wrong else []
    problems += _unreachable(root, pages)
    return LintReport(
        tuple(folder.name for folder in skills),
        tuple(path.stem for path in agents),
        len(pages),
        commands,
        tuple(sorted(problems, key=lambda item: (item.file, item.line, item.message))),
    )


def _paths(root: Path) -> list[Path]:
    return sorted(path for folder in ("skills", "agents", "references") for path in (root / folder).rglob("*.md"))


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _plugin(root: Path) -> Iterator[Problem]:
    file = root / ".claude-plugin" / "plugin.json"
    name = ".claude-plugin/plugin.json"
    try:
        plugin = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Problem(name, 1, "plugin", f"cannot be read: {error}")
        return
    if not isinstance(plugin, dict) or not _NAME.fullmatch(str(plugin.get("name", ""))):
        yield Problem(name, 1, "plugin", "needs a name of small letters, digits and hyphens")
        return
    if plugin.get("version") != __version__:
        yield Problem(name, 1, "plugin", f"says version {plugin.get('version')}, the package is {__version__}")


def _skill(root: Path, folder: Path, pages: dict[Path, Page]) -> list[Problem]:
    path = folder / SKILL_FILE
    if path not in pages:
        return [Problem(_name(root, folder), 1, "frontmatter", f"holds no {SKILL_FILE}: it is no skill")]
    page, name = pages[path], _name(root, path)
    problems = _frontmatter(name, page, _SKILL_KEYS, folder.name)
    if "allowed-tools" in (page.meta or {}):
        problems.append(Problem(name, 1, "frontmatter", "allowed-tools grants permissions that nobody was asked for"))
    if page.lines >= SKILL_LINES:
        problems.append(Problem(name, page.lines, "size", f"{page.lines} lines; it stays below {SKILL_LINES}"))
    return problems


def _agent(root: Path, page: Page) -> list[Problem]:
    name = _name(root, page.path)
    problems = _frontmatter(name, page, _AGENT_KEYS, page.path.stem)
    tools = (page.meta or {}).get("tools")
    named = [tool.strip() for tool in tools.split(",")] if isinstance(tools, str) else tools
    if not isinstance(named, list) or not named or not all(isinstance(tool, str) and tool for tool in named):
        problems.append(Problem(name, 1, "frontmatter", "tools must name the few tools that the agent needs"))
    return problems


def _frontmatter(name: str, page: Page, known: set[str], expected: str) -> list[Problem]:
    if page.meta is None:
        return [Problem(name, 1, "frontmatter", "is missing: the page would not be loaded")]
    if page.meta_problem:
        return [Problem(name, 1, "frontmatter", page.meta_problem)]
    problems = []
    given = page.meta.get("name")
    if given != expected or not _NAME.fullmatch(str(given)) or len(str(given)) > 64:
        problems.append(Problem(name, 1, "frontmatter", f"name is {given!r}, the path says {expected!r}"))
    text = page.meta.get("description")
    if not isinstance(text, str) or not 20 <= len(text) <= 1024:
        problems.append(Problem(name, 1, "frontmatter", "description must say in 20 to 1024 characters what, and when"))
    for key in sorted(set(page.meta) - known - {"allowed-tools"}):
        problems.append(Problem(name, 1, "frontmatter", f"unknown key {key!r}; known are {', '.join(sorted(known))}"))
    return problems


def _size(name: str, page: Page) -> list[Problem]:
    if page.lines < PAGE_LINES or page.path.name == SKILL_FILE:
        return []
    return [Problem(name, page.lines, "size", f"{page.lines} lines; a page stays below {PAGE_LINES}")]


def _links(root: Path, page: Page, pages: dict[Path, Page]) -> list[Problem]:
    problems = []
    for link in page.links:
        if re.match(r"[a-z]+:", link.text):
            continue
        path, _, anchor = link.text.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        name = _name(root, page.path)
        if not target.exists() or not target.is_relative_to(root.resolve()):
            problems.append(Problem(name, link.line, "link", f"{link.text} leads nowhere"))
        elif anchor and target.suffix == ".md":
            other = pages.get(target) or read_page(target)
            if anchor not in other.anchors:
                problems.append(Problem(name, link.line, "link", f"{path or 'this page'} has no heading #{anchor}"))
    return problems


def _paths_named(root: Path, page: Page) -> list[Problem]:
    """Files of this repository that code spans and shell blocks name."""
    texts = [(span.text, span.line) for span in page.spans]
    texts += [(fence.text, fence.line) for fence in page.fences if fence.language not in _CODE]
    return [
        Problem(_name(root, page.path), line, "path", f"there is no {named}")
        for text, line in texts
        for named in re.findall(rf"(?<![\w/.}}$-]){_OWN_PATH.pattern}", text.replace(PLUGIN_ROOT + "/", " "))
        if not (root / named).exists() and not (page.path.parent / named).exists()
    ]


def _code(name: str, page: Page) -> list[Problem]:
    problems = []
    for fence in page.fences:
        if not fence.language:
            problems.append(
                Problem(name, fence.line, "code", "a block without a language: bash, python, json, text ...")
            )
        try:
            if fence.language == "python":
                compile(fence.text, name, "exec")
            elif fence.language == "json":
                json.loads(fence.text)
        except (SyntaxError, ValueError) as error:
            problems.append(Problem(name, fence.line, "code", f"is no {fence.language}: {error}"))
    return problems


def _unreachable(root: Path, pages: dict[Path, Page]) -> list[Problem]:
    """Pages that no skill leads to, over links and over the names of agents."""
    waiting = [path for path in pages if path.name == SKILL_FILE]
    seen: set[Path] = set()
    agents = {path.stem: path for path in pages if path.parent == root / "agents"}
    while waiting:
        page = pages[waiting.pop()]
        if page.path in seen:
            continue
        seen.add(page.path)
        linked = {(page.path.parent / link.text.partition("#")[0]).resolve() for link in page.links}
        named = {agents[span.text] for span in page.spans if span.text in agents}
        waiting += [path for path in pages if path.resolve() in linked or path in named]
    return [Problem(_name(root, path), 1, "reach", "no skill leads here") for path in pages if path not in seen]
