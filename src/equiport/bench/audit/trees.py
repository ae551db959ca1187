"""The static audit over a tree of many ports that somebody else wrote: seconds, crashes, and counts by rule."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from equiport.audit import audit_path
from equiport.errors import EquiportError


class Place(BaseModel):
    """A finding without the line's text."""

    model_config = ConfigDict(frozen=True)

    rule: str
    severity: str
    file: str
    line: int
    message: str


class PortRow(BaseModel):
    """One folder of the tree. `seconds`: processor time. `crashed`: what the audit raised, empty as it should be."""

    model_config = ConfigDict(frozen=True)

    port: str
    files: int
    seconds: float
    findings: list[Place] = []
    crashed: str = ""


class TreeTable(BaseModel):
    """The whole tree."""

    model_config = ConfigDict(frozen=True)

    rows: list[PortRow]

    @property
    def passed(self) -> bool:
        """Every folder in under five seconds and without a crash."""
        return bool(self.rows) and all(row.seconds < 5.0 and not row.crashed for row in self.rows)


def run_tree(tree: Path, say: Callable[[str], None] = lambda _: None) -> TreeTable:
    """Audit each folder directly below `tree` by itself.

    Raises:
        EquiportError: no such folder, or no folder with Python files in it.
    """
    if not tree.is_dir():
        raise EquiportError("no such folder", where=tree, field="--tree", remedy="Give a folder of ports.")
    rows = []
    for folder in sorted(path for path in tree.iterdir() if path.is_dir() and any(path.rglob("*.py"))):
        clock = time.process_time()
        try:
            found = audit_path(folder)
        except Exception as error:  # the point of the run: none may come
            spent = time.process_time() - clock
            rows.append(PortRow(port=folder.name, files=0, seconds=spent, crashed=f"{type(error)}: {error}"))
            continue
        places = [
            Place(rule=item.rule, severity=item.severity.value, file=item.file, line=item.line, message=item.message)
            for item in found.findings
        ]
        seconds = round(time.process_time() - clock, 3)
        rows.append(PortRow(port=folder.name, files=len(found.files), seconds=seconds, findings=places))
        say(f"{folder.name:<44}{len(found.files):>4} files {seconds:>7.2f} s {len(places):>5} findings")
    if not rows:
        raise EquiportError("holds no folder with Python files", where=tree, field="--tree", remedy="Check the path.")
    return TreeTable(rows=rows)


def tree_lines(table: TreeTable) -> list[str]:
    """Counts by rule and severity, and the slowest folder."""
    counts = Counter((item.rule, item.severity) for row in table.rows for item in row.findings)
    ports = {key: sum(any((i.rule, i.severity) == key for i in row.findings) for row in table.rows) for key in counts}
    lines = [f"{'rule':<26}{'severity':<10}{'findings':>9}{'ports':>7}"]
    lines += [f"{rule:<26}{severity:<10}{count:>9}{ports[rule, severity]:>7}" for (rule, severity), count in
              sorted(counts.items(), key=lambda item: -item[1])]  # fmt: skip
    slow = max(table.rows, key=lambda row: row.seconds)
    files, crashed = sum(row.files for row in table.rows), [row for row in table.rows if row.crashed]
    lines += [
        "",
        f"{len(table.rows)} ports, {files} files, {sum(row.seconds for row in table.rows):.1f} s; "
        f"slowest {slow.port} ({slow.seconds:.2f} s); {len(crashed)} crashes",
        *(f"  crashed: {row.port}: {row.crashed}" for row in crashed),
    ]
    return lines
