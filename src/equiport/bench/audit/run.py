"""Run the audit over the corpus."""

from __future__ import annotations

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from equiport.audit import RULES, audit_path
from equiport.audit.report import Finding
from equiport.bench.audit.corpus import QUICK, Honest, cheats, generated, honest, written
from equiport.bench.audit.table import AuditTable, RuleRow
from equiport.bench.family_models import FAMILIES


@dataclass(frozen=True)
class AuditBench:
    """What to run: generated ports of all families, or of three."""

    quick: bool = False


def run_audit_bench(bench: AuditBench, say: Callable[[str], None] = lambda _: None) -> AuditTable:
    """Audit every folder of the corpus by itself. Nothing of it is run.

    Raises:
        EquiportError: a family of the generated ports cannot be made.
    """
    clock = time.monotonic()
    found: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    missed = []
    with tempfile.TemporaryDirectory(prefix="equiport-audit-bench-") as place:
        work = Path(place)
        for number, cheat in enumerate(cheats()):
            hits = _audited(cheat.files, work / f"cheat-{number}")
            right = any(item.rule == cheat.rule for item in hits)
            found[cheat.rule, cheat.held_out].append(right)
            if not right:
                missed.append(f"{cheat.name} ({cheat.rule})")
        say(f"{sum(len(item) for item in found.values())} cheats")
        families = QUICK if bench.quick else tuple(FAMILIES)
        sets: list[Iterable[Honest]] = [honest(), generated(families, work / "generated")]
        flagged: dict[str, set[str]] = defaultdict(set)
        kinds: Counter[str] = Counter()
        alarms = []
        for number, item in enumerate(entry for entries in sets for entry in entries):
            kinds[item.kind] += len(item.files)
            for hit in _audited(item.files, work / f"honest-{number}"):
                if hit.counts:
                    flagged[hit.rule].add(f"{item.name}/{hit.file}")
                    where = f"{item.name.replace(' ', '_')}/{hit.file}:{hit.line}"
                    alarms.append(f"{where} {hit.rule}: {hit.message}")
    rows = [
        RuleRow(
            rule=rule.id,
            own=sum(found[rule.id, False]),
            own_total=len(found[rule.id, False]),
            held_out=sum(found[rule.id, True]),
            held_out_total=len(found[rule.id, True]),
            flagged=len(flagged[rule.id]),
        )
        for rule in RULES
    ]
    return AuditTable(
        rows=rows,
        honest_files=sum(kinds.values()),
        honest_kinds=dict(kinds),
        missed=missed,
        alarms=alarms,
        seconds=round(time.monotonic() - clock, 1),
    )


def _audited(files: dict[str, str], folder: Path) -> list[Finding]:
    return audit_path(written(files, folder)).findings
