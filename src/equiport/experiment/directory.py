"""The experiment directory: where everything of one validation lies, and whether it still holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from equiport import __version__
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError, PrerequisiteError
from equiport.experiment.config import CONFIG_NAME, EquivConfig, load_config
from equiport.experiment.hashing import input_name, model_files, port_files, sha256
from equiport.experiment.results import BackendStamp, StageResult, load_result


@dataclass(frozen=True)
class Freshness:
    """Whether a stored result still matches what it was made from; `changed` says what does not."""

    exists: bool
    changed: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """True when the result exists and nothing it was made from has changed."""
        return self.exists and not self.changed


@dataclass(frozen=True)
class Experiment:
    """An experiment directory with its validated config. `mapping_name`: another mapping, of a patched port."""

    root: Path
    config: EquivConfig
    mapping_name: str = "component_mapping.json"

    @classmethod
    def open(cls, root: Path) -> Experiment:
        """Open an existing experiment.

        Raises:
            EquiportError: the folder or its equiv_config.json is missing or invalid.
        """
        if not root.is_dir():
            raise EquiportError("no such experiment directory", where=root, remedy="Check --exp-dir.")
        return cls(root.resolve(), load_config(root))

    @classmethod
    def find(cls, start: Path) -> Experiment | None:
        """The experiment that holds `start`, searched upwards by equiv_config.json; None if there is none."""
        for folder in [start.absolute(), *start.absolute().parents]:
            if (folder / CONFIG_NAME).is_file():
                return cls.open(folder)
        return None

    @property
    def model_tree(self) -> Path:
        """Stage 0's trees."""
        return self.root / "model_tree"

    @property
    def mapping_file(self) -> Path:
        """The component mapping."""
        return self.root / self.mapping_name

    @property
    def divergence_file(self) -> Path:
        """CPU and device class branches."""
        return self.root / "class_divergence_report.json"

    @property
    def tests(self) -> Path:
        """Component tests of stage 2."""
        return self.root / "tests"

    @property
    def patches(self) -> Path:
        """Standalone monkey patches of stage 4."""
        return self.root / "patches"

    @property
    def results(self) -> Path:
        """Stage results."""
        return self.root / "results"

    @property
    def plots(self) -> Path:
        """Plots that the report shows."""
        return self.root / "plots"

    @property
    def report_file(self) -> Path:
        """The report."""
        return self.root / "EQUIVALENCE_REPORT.md"

    def result_path(self, stage: int) -> Path:
        """Where stage `stage` leaves its result."""
        return self.results / f"stage{stage}.json"

    def result(self, stage: int) -> StageResult | None:
        """The stored result of a stage; None if it did not run.

        Raises:
            EquiportError: the file is damaged.
        """
        path = self.result_path(stage)
        return load_result(path) if path.is_file() else None

    def freshness(self, stage: int, backend: BackendStamp | None = None) -> Freshness:
        """Compare a stored result with its inputs as they are now, with this equiport and this backend."""
        result = self.result(stage)
        if result is None:
            return Freshness(exists=False)
        changed = [name for name, digest in result.inputs.items() if not self._still(name, digest)]
        changed += [f"{name} (new)" for name in self._expected_inputs(stage) if name not in result.inputs]
        if result.tool_version != __version__:
            changed.append(f"equiport {result.tool_version} -> {__version__}")
        if backend and result.backend and result.backend.identity != backend.identity:
            changed.append(f"backend {result.backend.headline} -> {backend.headline}")
        return Freshness(exists=True, changed=tuple(changed))

    def require(self, stage: int, needs: dict[int, bool], *, force: bool) -> bool:
        """Check what `stage` needs: stage number -> must it have passed (else: have run).

        Returns True when the lack was overridden by `force`, to be shown in the report.

        Raises:
            PrerequisiteError: something is missing, stale or did not pass, and `force` is not set.
        """
        lacks = [lack for number, must_pass in needs.items() if (lack := self._lack(number, must_pass))]
        if lacks and not force:
            raise PrerequisiteError(
                f"stage {stage} cannot run: " + "; ".join(lacks),
                where=self.root,
                remedy="Run the named stage first, or add --force (the report will show it).",
            )
        return bool(lacks)

    def _lack(self, number: int, must_pass: bool) -> str:
        result, state = self.result(number), self.freshness(number)
        if result is None:
            return f"stage {number} has not run"
        if not state.fresh:
            return f"stage {number} is stale ({', '.join(state.changed)} changed)"
        if must_pass and result.verdict is not Verdict.PASS:
            return f"stage {number} is {result.verdict.value}, PASS is needed"
        return ""

    def _expected_inputs(self, stage: int) -> list[str]:
        """What a result of this experiment must have been made from: its own model and port, whole, and its tests."""
        config = self.config
        paths = [*model_files(config.source_model_path), *port_files(config.target_modeling_file)]
        if stage == 2:
            paths += sorted(self.tests.glob("test_*.py"))
        return [input_name(path, self.root) for path in paths]

    def _still(self, name: str, digest: str) -> bool:
        path = Path(name) if Path(name).is_absolute() else self.root / name
        return path.is_file() and _digest(path) == digest


_digests: dict[tuple[str, int, int], str] = {}


def _digest(path: Path) -> str:
    # one process asks for the same weights many times
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _digests:
        _digests[key] = sha256(path)
    return _digests[key]
