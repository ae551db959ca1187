"""What every command of this repository takes, asked of the commands themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from equiport.errors import EquiportError
from equiport.skills.command_line import PROGRAM, CommandSpec

_HELP = {"--help": False}
_FLAG_LINE = re.compile(r"^\s+(?:-\w(?: \w+)?, )?(--[\w-]+)(?:[ =](\S+))?", re.MULTILINE)


class Commands(Mapping[tuple[str, ...], CommandSpec]):
    """What commands take, by their names; a script is asked when somebody wants to know."""

    def __init__(self, verbs: Mapping[tuple[str, ...], CommandSpec], scripts: Sequence[Path]) -> None:
        self._known = dict(verbs)
        self._scripts: dict[tuple[str, ...], Path] = {(script.name,): script for script in scripts}

    def __getitem__(self, name: tuple[str, ...]) -> CommandSpec:
        if name not in self._known:
            script = self._scripts[name]
            verb = _verb(script)
            self._known[name] = _from_help(script) if verb is None else _with_lists(_spec(_as_command(verb)), verb)
        return self._known[name]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter([*self._known, *(name for name in self._scripts if name not in self._known)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._scripts


def command_table(scripts: Path) -> Commands:
    """Every verb of `equiport` and every script of the folder `scripts`."""
    from equiport.cli import app

    verbs: dict[tuple[str, ...], CommandSpec] = {}
    _collect((PROGRAM,), get_command(app), verbs)
    return Commands(verbs, [path for path in sorted(scripts.glob("*.py")) if "__main__" in path.read_text("utf-8")])


def _collect(name: tuple[str, ...], command: Any, table: dict[tuple[str, ...], CommandSpec]) -> None:
    inner = getattr(command, "commands", None)
    table[name] = _spec(command)
    for verb, one in (inner or {}).items():
        _collect((*name, verb), one, table)


def _spec(command: Any) -> CommandSpec:
    options = [item for item in command.params if item.param_type_name == "option"]
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    flags = {flag: not item.is_flag for item in options for flag in (*item.opts, *item.secondary_opts)}
    required = tuple(tuple(item.opts) for item in options if item.required)
    fewest = sum(1 for item in arguments if item.required)
    most = None if any(item.nargs < 0 for item in arguments) else len(arguments)
    return CommandSpec({**flags, **_HELP}, required, (fewest, most), verbs=bool(getattr(command, "commands", None)))


def _as_command(function: Callable[..., Any]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return get_command(app)


def _verb(script: Path) -> Callable[..., Any] | None:
    """The typer function behind a script of the form `from equiport.cli.x import main`."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equiport.cli."):
            function: Callable[..., Any] | None = getattr(import_module(str(node.module)), "command", None)
            return function
    return None


def _with_lists(spec: CommandSpec, function: Callable[..., Any]) -> CommandSpec:
    """Some flags take several values: the function's module names them."""
    many = frozenset(getattr(sys.modules[function.__module__], "_LISTS", ()))
    return CommandSpec(spec.flags, spec.required, spec.positionals, many)


def _from_help(script: Path) -> CommandSpec:
    """Of a script that is no typer command; an EquiportError when its --help does not come."""
    try:
        said = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise EquiportError("--help takes two minutes", where=script, remedy="Run it by hand and mend it.") from None
    if said.returncode:
        raise EquiportError("--help fails", where=script, remedy="Run it by hand and mend it.")
    usage = said.stdout.partition("\n\n")[0]
    optional = " ".join(re.findall(r"\[[^\]]*\]", usage))
    flags = {match[1]: match[2] is not None for match in _FLAG_LINE.finditer(said.stdout)}
    required = tuple((flag,) for flag in flags if flag in usage and f"[{flag}" not in optional and flag != "--help")
    return CommandSpec({**flags, **_HELP}, required)
