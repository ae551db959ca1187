"""Commands that pages tell the reader to type, and whether they exist as they are written.

The commands themselves say what they take (`CommandSpec`); nothing about them is written down here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from equiport.skills.page import Page

SHELLS = ("bash", "sh", "shell", "console")
PROGRAM = "equiport"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHONS = re.compile(r"(?:\S*/)?python3?(?:\.\d+)?")
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_LEFT_OUT = {"...", "…", "…]"}


@dataclass(frozen=True)
class CommandSpec:
    """What a command takes. `flags`: flag -> whether a value follows; `required`: each a choice of flags.

    `positionals`: fewest and most arguments (None: any number). `many`: flags that take several values.
    `verbs`: a verb must follow.
    """

    flags: Mapping[str, bool]
    required: tuple[tuple[str, ...], ...] = ()
    positionals: tuple[int, int | None] = (0, 0)
    many: frozenset[str] = field(default=frozenset())
    verbs: bool = False


#: ("equiport", "validate") or ("run_stage0.py",) -> what it takes.
CommandTable = Mapping[tuple[str, ...], CommandSpec]


@dataclass(frozen=True)
class Invocation:
    """A command in a page. `whole`: written to be typed as it stands, so that required flags must be there."""

    words: tuple[str, ...]
    line: int
    whole: bool


def invocations(page: Page, scripts: frozenset[str]) -> Iterator[Invocation]:
    """Every `equiport ...` and `scripts/....py ...` of a page; `scripts` are the names of the scripts that exist."""
    for fence in page.fences:
        if fence.language in SHELLS:
            for number, text in _joined(fence.text):
                for words in _commands(text):
                    found = _ours(words, scripts)
                    if found:
                        yield Invocation(found, fence.line + number, whole=not _LEFT_OUT & set(words))
    for span in page.spans:
        for words in _commands(re.sub(r"[\[\]]", " ", span.text)):
            found = _ours(words, scripts)
            if found and found != (PROGRAM,):
                yield Invocation(found, span.line, whole=False)


def problem_of(command: Invocation, table: CommandTable) -> str:
    """What is wrong with a command; empty when it can be typed."""
    name, rest = _split(command.words, table)
    if name not in table:
        return f"there is no command `{' '.join(name)}`"
    spec = table[name]
    following = next((word for word in rest if not word.startswith("-")), "")
    if spec.verbs and following:
        return f"there is no command `{' '.join((*name, following))}`"
    given, positionals, fault = _parsed(rest, spec)
    if fault:
        return f"`{' '.join(name)}` {fault}"
    lacking = [flags[0] for flags in spec.required if not given & set(flags)]
    if command.whole and lacking:
        return f"`{' '.join(name)}` needs {', '.join(lacking)}"
    fewest, most = spec.positionals
    if most is not None and positionals > most:
        return f"`{' '.join(name)}` takes {most} arguments, here are {positionals}"
    if command.whole and positionals < fewest:
        return f"`{' '.join(name)}` needs {fewest} arguments, here are {positionals}"
    return ""


def _parsed(words: tuple[str, ...], spec: CommandSpec) -> tuple[set[str], int, str]:
    """Flags given, number of positional arguments, and what does not fit."""
    given: set[str] = set()
    positionals, waiting = 0, list(words)
    while waiting:
        word = waiting.pop(0)
        if word in _LEFT_OUT:
            continue
        if not word.startswith("-") or word == "-":
            positionals += 1
            continue
        flag, equals, _ = word.partition("=")
        if flag not in spec.flags:
            return given, positionals, f"has no flag {flag}"
        given.add(flag)
        if equals or not spec.flags[flag]:
            continue
        if waiting and not waiting[0].startswith("-"):
            waiting.pop(0)
        while flag in spec.many and waiting and not waiting[0].startswith("-"):
            waiting.pop(0)
    return given, positionals, ""


def _split(words: tuple[str, ...], table: CommandTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The command's name (its longest known prefix, else its first word) and what follows."""
    for length in range(len(words), 0, -1):
        if words[:length] in table:
            return words[:length], words[length:]
    return words[:1], words[1:]


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations, and the number of their first line."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines()):
        first = number if not whole else first
        whole += line.removeprefix("$ ")
        if whole.endswith("\\"):
            whole = whole[:-1] + " "
            continue
        yield first, whole
        whole = ""
    if whole:
        yield first, whole


def _commands(text: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a line, without assignments in front."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word in _SEPARATORS:
            if command:
                yield tuple(command)
            command = []
        elif command or not _ASSIGNMENT.match(word):
            command.append(word)


def _ours(words: tuple[str, ...], scripts: frozenset[str]) -> tuple[str, ...]:
    """The words from our command's name on, a script by its file name; empty for other commands."""
    rest = words[1:] if len(words) > 1 and _PYTHONS.fullmatch(words[0]) else words
    if rest and rest[0] == PROGRAM:
        return rest
    name = rest[0].rsplit("/", 1)[-1] if rest else ""
    if name in scripts or (rest and re.search(r"(?:^|/)scripts/[\w]+\.py$", rest[0])):
        return (name, *rest[1:])
    return ()
