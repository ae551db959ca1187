"""Patches and reviews by agents, on an experiment in outline: audited, tried, taken out again, and only advised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equiport.agents.backend import Job, JobResult, Stop
from equiport.agents.budget import Budget
from equiport.agents.sessions import Sessions
from equiport.compare.verdict import Reason, Verdict
from equiport.errors import ExitCode
from equiport.port import agent_debugger
from equiport.port.agent_debugger import Debugging, debug, wanted
from equiport.port.agent_limits import AgentLimits
from equiport.port.agent_reviewer import review
from equiport.report.advisory import read_advisory

from .fake_backend import DONE, FakeBackend, MemoryJournal

PORT = "class NeuronThing:\n    def scale(self):\n        return 2\n"
GUARDED = '''"""thing fails: its scale is doubled; the source has 1 (Thing.scale)."""


def apply_thing_patch():
    """Call it before the model is made; a second call changes nothing."""
    import modeling_thing_nxdi as port

    if getattr(port.NeuronThing, "_patched_thing", False):
        return
    port.NeuronThing.scale = lambda self: 1
    port.NeuronThing._patched_thing = True
'''
UNGUARDED = GUARDED.replace("    port.NeuronThing._patched_thing = True\n", "")
NO_CHANGE = GUARDED.replace("    port.NeuronThing.scale = lambda self: 1\n", "")
CHEAT = GUARDED.replace(
    "    import modeling_thing_nxdi as port\n",
    """    import equiport.compare.threeway as judge
    import modeling_thing_nxdi as port

    judge.compare_3tensors = lambda *given, **more: None
""",
)


class Outline:
    """An experiment as the debugger sees it: stage 2 failed, stage 3 has a suspect, stage 4 passes when it says so."""

    def __init__(self, root: Path) -> None:
        self.root, self.patches, self.results = root, root / "patches", root / "results"
        self.config = SimpleNamespace(target_causal_class="NeuronThingForCausalLM", target_inner_class="NeuronThing")
        self.patched: Any = None
        suspect = {
            "rank": 1, "component": "layers.{i}.thing", "layer": 0, "fixture": "perturbed", "phase": "decode",
            "pattern": "step", "r_ratio": 9.0, "r32": 100.0, "root_cause": "wrong scale", "description": "step",
            "source_modules": ["model.layers.0.thing"], "target_modules": ["layers.0.thing"], "consequences": [],
        }  # fmt: skip
        self.located = {"failing": ["layers.{i}.thing"], "suspects": [suspect], "without_suspect": []}
        self.results.mkdir(parents=True)

    def result_path(self, stage: int) -> Path:
        return self.results / f"stage{stage}.json"

    def result(self, stage: int) -> Any:
        found = Reason("R_GEOMEAN", "9.0 > 1.10", "layers.{i}.thing")
        return {
            2: SimpleNamespace(verdict=Verdict.FAIL, reasons=[found], metrics={}),
            3: SimpleNamespace(verdict=Verdict.PASS, reasons=[], metrics=self.located),
            4: self.patched,
        }[stage]


@pytest.fixture
def outline(tmp_path: Path) -> Outline:
    return Outline(tmp_path / "exp")


@pytest.fixture
def given(outline: Outline, tmp_path: Path) -> Debugging:
    port = tmp_path / "src" / "modeling_thing_nxdi.py"
    port.parent.mkdir()
    port.write_text(PORT)
    plan: Any = SimpleNamespace(
        stack="nxdi",
        fingerprint=SimpleNamespace(
            architecture="LlamaForCausalLM", source_file="transformers/models/llama/modeling_llama.py"
        ),
    )
    experiment: Any = outline
    folder = tmp_path / "debugger"
    folder.mkdir()
    return Debugging(experiment, plan, port, folder)


def sessions(backend: FakeBackend, root: Path) -> Sessions:
    return Sessions(backend, MemoryJournal(), Budget(None), root / "transcripts", lambda text: None)


def patches(*texts: str | None) -> Callable[[Job], JobResult]:
    left = list(texts)

    def answer(job: Job) -> JobResult:
        text = left.pop(0)
        if text is not None:
            (job.access.workspace / job.access.writable[0]).write_text(text)
        return DONE

    return answer


def test_a_patch_is_audited_tried_and_measured(
    given: Debugging, outline: Outline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault goes back with its reason; what is in force at the end is the patch that stage 4 passed."""
    runs: list[list[str]] = []

    def stages() -> ExitCode:
        names = sorted(path.read_text() for path in outline.patches.glob("*.py"))
        runs.append(names)
        if not names:
            outline.patched = None
            return ExitCode.FAIL
        good = len([run for run in runs if run]) > 1
        found = [] if good else [Reason("R_GEOMEAN", "3.0 > 1.10", "layers.{i}.thing")]
        outline.patched = SimpleNamespace(verdict=Verdict.PASS if good else Verdict.FAIL, reasons=found)
        return ExitCode.PASS if good else ExitCode.FAIL

    assert wanted(given.experiment)
    backend = FakeBackend(patches(None, CHEAT, UNGUARDED, NO_CHANGE, GUARDED, GUARDED + "# again\n"))
    code = debug(given, sessions(backend, tmp_path), AgentLimits(attempts=6), stages)
    assert code is ExitCode.PASS
    tasks = [job.prompt for job, _ in backend.ran]
    assert len(tasks) == 6
    assert "layers.{i}.thing (source model.layers.0.thing; port layers.0.thing), decode" in tasks[0]
    for task, said in zip(
        tasks[1:],
        ("patch_layers_i_thing.py was not written", "the audit refuses the patch", "is not idempotent",
         "changes no class of the port", "stage 4 does not pass with it: R_GEOMEAN layers.{i}.thing: 3.0 > 1.10"),
        strict=True,
    ):  # fmt: skip
        assert task.startswith("IMPORTANT: attempt") and said in task.partition("\n\n")[0], task[:400]
    assert [path.name for path in outline.patches.glob("*.py")] == ["patch_layers_i_thing.py"]
    # without the patch that did not help, the stages are as they were
    assert runs == [[GUARDED], [], [GUARDED + "# again\n"]]
    assert given.port.read_text() == PORT
    job = backend.ran[0][0]
    assert job.access.writable == ("patch_layers_i_thing.py",) and job.access.workspace == given.folder
    assert given.port.parent.resolve() in job.access.readable


def test_no_patch_is_left_behind(given: Debugging, outline: Outline, tmp_path: Path) -> None:
    backend = FakeBackend(patches(UNGUARDED, None))
    limits = AgentLimits(attempts=2)
    (given.folder / "notes.md").write_text("x")
    assert debug(given, sessions(backend, tmp_path), limits, lambda: pytest.fail("no stage is run")) is None
    assert list(outline.patches.glob("*.py")) == []
    # and another call does not pay again for what was rejected
    assert debug(given, sessions(backend, tmp_path), limits, lambda: pytest.fail("no stage is run")) is None
    assert len(backend.ran) == 2


def test_when_a_patch_is_wanted(given: Debugging, outline: Outline) -> None:
    outline.patches.mkdir()
    (outline.patches / "of_a_person.py").write_text(GUARDED)
    assert not wanted(given.experiment)
    (outline.patches / "of_a_person.py").unlink()
    outline.located = {**outline.located, "suspects": []}
    assert not wanted(given.experiment)


def test_a_review_is_told_paths_and_changes_nothing(given: Debugging, outline: Outline, tmp_path: Path) -> None:
    finding = {"severity": "high", "file": "a.py", "line": 3, "finding": "eps is written out", "why": "1e-5 at line 3"}
    backend = FakeBackend(lambda job: replace(DONE, structured={"findings": [finding]}))
    source = Path(agent_debugger.__file__)
    experiment: Any = outline
    made = review(experiment, given.port, source, tmp_path / "reviewer", sessions(backend, tmp_path), AgentLimits())
    assert made is not None and made == read_advisory(experiment)
    job = backend.ran[0][0]
    assert job.access.writable == () and set(job.access.tools) <= {"Read", "Glob", "Grep"}
    assert job.prompt.splitlines() == [
        "Job: review a port.", f"The port: {given.port.resolve()}", f"The source: {source}",
        f"The experiment: {outline.root}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "result",
    [
        replace(DONE, structured={"findings": [{"severity": "fatal"}]}),
        replace(DONE, structured=None),
        JobResult(Stop.REFUSED),
    ],
)
def test_a_review_without_a_usable_answer_is_none(
    result: JobResult, given: Debugging, outline: Outline, tmp_path: Path
) -> None:
    experiment: Any = outline
    backend = FakeBackend(lambda job: result)
    source = Path(agent_debugger.__file__)
    assert review(experiment, given.port, source, tmp_path / "r", sessions(backend, tmp_path), AgentLimits()) is None
    assert read_advisory(experiment) is None
