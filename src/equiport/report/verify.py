"""Whether a report still holds: nothing that it was made from, nor itself, has changed."""

from __future__ import annotations

from dataclasses import dataclass

from equiport.audit.experiment import changed_since
from equiport.errors import EquiportError, ExitCode
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json
from equiport.experiment.config import CONFIG_NAME
from equiport.experiment.hashing import sha256
from equiport.report.build import STAMP_NAME
from equiport.report.completion import completion


@dataclass(frozen=True)
class Verification:
    """What no longer holds; nothing when the report does."""

    headline: str
    problems: tuple[str, ...]
    state: str

    def show(self) -> ExitCode:
        """Print the findings. PREREQUISITE (stale) when something changed, else the report's own exit code."""
        for problem in self.problems:
            print(problem)
        if self.problems:
            print(f"the report no longer holds ({len(self.problems)} changes); run equiport validate again")
            return ExitCode.PREREQUISITE
        print(f"the report holds: {self.headline}")
        return {
            "PASS": ExitCode.PASS,
            "FAIL": ExitCode.FAIL,
            "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
        }.get(self.state, ExitCode.PREREQUISITE)


def verify_report(experiment: Experiment) -> Verification:
    """Re-hash everything that the report rests on.

    Raises:
        EquiportError: there is no report.
    """
    path = experiment.results / STAMP_NAME
    if not path.is_file() or not experiment.report_file.is_file():
        raise EquiportError("has no report", where=experiment.root, remedy="Run equiport report EXP_DIR.")
    stamp = read_json(path, remedy="Run equiport report EXP_DIR again.")
    if not isinstance(stamp, dict) or not isinstance(stamp.get("results"), dict):
        raise EquiportError("is no report stamp", where=path, remedy="Run equiport report EXP_DIR again.")
    problems = []
    page = experiment.report_file.with_suffix(".html")
    for file, key in ((experiment.report_file, "report"), (page, "page"), (experiment.root / CONFIG_NAME, "config")):
        if not file.is_file():
            problems.append(f"{file.name} is gone")
        elif sha256(file) != stamp.get(key):
            problems.append(f"{file.name} was edited after the report was written")
    for name, digest in stamp["results"].items():
        file = experiment.results / name
        if not file.is_file():
            problems.append(f"results/{name} is gone")
        elif sha256(file) != digest:
            problems.append(f"results/{name} changed after the report was written")
    for stage in range(8):
        state = experiment.freshness(stage)
        if state.exists and state.changed:
            problems.append(f"stage {stage}: {', '.join(state.changed)} changed")
    now = completion(experiment)
    problems += changed_since(experiment, now.audit)
    if now.headline != stamp.get("headline"):
        problems.append(f"the verdict would now read: {now.headline}")
    return Verification(str(stamp.get("headline")), tuple(problems), now.state)
