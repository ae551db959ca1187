"""The corpus's figures: what was detected and named, beside what the usual gates say of the same ports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from equiport.bench.portbugs.common_gates import GATES
from equiport.bench.portbugs.corpus import CaseResult


class Share(BaseModel):
    """How many of how many."""

    model_config = ConfigDict(frozen=True)

    count: int
    total: int

    @property
    def text(self) -> str:
        """`12/13 (92 %)`."""
        return f"{self.count}/{self.total} ({100 * self.count / self.total:.0f} %)" if self.total else "-"


class GateRow(BaseModel):
    """One gate: bugs that it sees and controls that it flags, on default and on perturbed weights."""

    model_config = ConfigDict(frozen=True)

    gate: str
    default: Share
    default_alarms: Share
    perturbed: Share
    perturbed_alarms: Share


class Summary(BaseModel):
    """Component and cause are counted over detected bugs, the first named one."""

    model_config = ConfigDict(frozen=True)

    detected: Share
    false_alarms: Share
    component_right: Share
    cause_right: Share
    families: int
    seconds_per_case: float
    gates: list[GateRow]


class PortBugsTable(BaseModel):
    """All cases of one run. `failed`: operators that could not be run, with what was said; they count as missed."""

    seed: int
    quick: bool
    versions: dict[str, str]
    cases: list[CaseResult]
    failed: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        """Every bug detected, no control flagged, every case run."""
        return bool(self.cases) and not self.failed and all(case.right for case in self.cases)

    def summary(self) -> Summary:
        """The figures."""
        bugs = [case for case in self.cases if not case.control]
        controls = [case for case in self.cases if case.control]
        seen = [case for case in bugs if case.judged.detected]
        seconds = [case.judged.seconds for case in self.cases]
        return Summary(
            detected=Share(count=len(seen), total=len(bugs) + len(self.failed)),
            false_alarms=_share(controls, lambda case: case.judged.detected),
            component_right=_share(seen, lambda case: case.component_right),
            cause_right=_share(seen, lambda case: case.cause_right),
            families=len({case.family.split()[0] for case in self.cases}),
            seconds_per_case=sum(seconds) / max(1, len(seconds)),
            gates=[_gate(name, bugs, controls) for name in GATES],
        )


def _share(cases: Sequence[CaseResult], fits: Callable[[CaseResult], bool]) -> Share:
    return Share(count=sum(map(fits, cases)), total=len(cases))


def _gate(name: str, bugs: Sequence[CaseResult], controls: Sequence[CaseResult]) -> GateRow:
    def default(case: CaseResult) -> bool:
        return case.common is not None and name in case.common.default

    def perturbed(case: CaseResult) -> bool:
        return case.common is not None and name in case.common.perturbed

    return GateRow(
        gate=name,
        default=_share(bugs, default),
        default_alarms=_share(controls, default),
        perturbed=_share(bugs, perturbed),
        perturbed_alarms=_share(controls, perturbed),
    )


def line_of(case: CaseResult) -> str:
    """One case in one line."""
    judged = case.judged
    word = "ok" if case.right else "FALSE ALARM" if case.control else "MISSED"
    if case.control:
        return f"{word:<12} {case.operator:<46} {case.family:<26}"
    marks = ("component" if case.component_right else "-") + " " + ("cause" if case.cause_right else "-")
    return f"{word:<12} {case.operator:<46} {case.family:<26} {marks:<16} {judged.component}: {judged.says}"


def lines_of(table: PortBugsTable) -> list[str]:
    """The summary as text."""
    found = table.summary()
    form = "{:<28} {:>18} {:>16} {:>18} {:>16}"
    lines = [
        f"{len(table.cases)} cases over {found.families} families, seed {table.seed}, "
        f"{found.seconds_per_case:.0f} s a case",
        f"detected         {found.detected.text}",
        f"false alarms     {found.false_alarms.text}",
        f"component right  {found.component_right.text}",
        f"cause right      {found.cause_right.text}",
        "",
        form.format("the same by other gates", "default: detected", "false alarms", "perturbed", "false alarms"),
    ]
    lines += [
        form.format(row.gate, row.default.text, row.default_alarms.text, row.perturbed.text, row.perturbed_alarms.text)
        for row in found.gates
    ]
    return lines + [f"could not be run: {name}: {said}" for name, said in table.failed.items()]


def misses(cases: Iterable[CaseResult]) -> list[str]:
    """Every case that is not wholly right, with what is wrong."""
    found = []
    for case in cases:
        wrong = [] if case.right else ["false alarm" if case.control else "not detected"]
        if not case.control and case.judged.detected:
            wrong += [] if case.component_right else [f"component {case.judged.component}"]
            wrong += [] if case.cause_right else [f"cause {case.judged.cause or 'unproven'}"]
        if wrong:
            found.append(f"{case.operator} ({case.family}): {', '.join(wrong)}")
    return found
