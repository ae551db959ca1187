"""Scenarios for the skills: a workspace that is given, what a session is asked, and what must lie on disk afterwards.

What a session says is not looked at; stages, reports and files that it left are. So a scenario can be played by any
agent CLI, by a scripted model, or by a person.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiport.compare.verdict import Verdict
from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.experiment import Experiment

Write = Callable[[Path], None]
Check = Callable[[Path], list[str]]

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 131,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# the attention of this port turns pairs of channels, the source's turns halves
_PAIRS = """

def _in_pairs(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
    if cos_cache is None or sin_cache is None:
        cos_cache, sin_cache = self.rotary_emb(V, position_ids)

    def turn(x):
        half = x.shape[-1] // 2
        cos = cos_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
        sin = sin_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin

    return turn(Q), turn(K), cos_cache, sin_cache


NeuronLlamaAttention.apply_rotary_embedding = _in_pairs
"""
_MLP = """import torch


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""
# a unit whose reference was written beside it
_UNIT = {
    "pytorch_block.py": _MLP.format(name="SourceMLP"),
    "nxdi_block.py": _MLP.format(name="NeuronMLP"),
    "test_block.py": """import torch
from nxdi_block import NeuronMLP
from pytorch_block import SourceMLP


def test_mlp():
    port, source = NeuronMLP(), SourceMLP()
    port.load_state_dict(source.state_dict())
    x = torch.randn(2, 8)
    assert torch.allclose(port(x), source(x), atol=1e-3)
""",
}


@dataclass(frozen=True)
class Scenario:
    """One scenario. `given` writes the workspace; `own`: files and folders that a session may make in it."""

    name: str
    skill: str
    prompt: str
    given: Write
    own: tuple[str, ...]
    looked_at: Check

    def prepare(self, workspace: Path) -> None:
        """Write the workspace.

        Raises:
            EquiportError: the folder is not empty.
        """
        if workspace.exists() and any(workspace.iterdir()):
            raise EquiportError("is not empty", where=workspace, remedy="Give a new folder.")
        workspace.mkdir(parents=True, exist_ok=True)
        self.given(workspace)

    def check(self, workspace: Path) -> list[str]:
        """What a session did not do, or did and must not; empty when it followed the skill."""
        return [*self._untouched(workspace), *self.looked_at(workspace)]

    def _untouched(self, workspace: Path) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            self.given(Path(folder))
            wanted = _files(Path(folder))
        found = {name: data for name, data in _files(workspace).items() if not self._is_own(name)}
        problems = [f"{name} was given and is gone" for name in sorted(set(wanted) - set(found))]
        problems += [f"{name} was changed" for name in sorted(wanted) if found.get(name, wanted[name]) != wanted[name]]
        problems += [f"{name} was written, which nobody asked for" for name in sorted(set(found) - set(wanted))]
        return problems

    def _is_own(self, name: str) -> bool:
        return any(name == own or name.startswith(own + "/") for own in self.own)


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.relative_to(folder).parts[0].startswith(".")
    }


def _world(appended: str = "") -> Write:
    def write(workspace: Path) -> None:
        (workspace / "hf_model").mkdir()
        (workspace / "hf_model" / "config.json").write_text(json.dumps(_LLAMA, indent=2))
        example = content_dir("examples") / "llama" / "modeling_llama_nxdi.py"
        (workspace / "port").mkdir()
        (workspace / "port" / example.name).write_text(example.read_text(encoding="utf-8") + appended)

    return write


def _unit(workspace: Path) -> None:
    (workspace / "unit").mkdir()
    for name, text in _UNIT.items():
        (workspace / "unit" / name).write_text(text)


def _claim(workspace: Path) -> None:
    """A config key that speaks of a window which the source does not compute."""
    (workspace / "hf_model").mkdir()
    (workspace / "hf_model" / "config.json").write_text(json.dumps({**_LLAMA, "sliding_window": 32}, indent=2))


def _experiment(workspace: Path) -> tuple[Experiment | None, list[str]]:
    if not (workspace / "exp" / "equiv_config.json").is_file():
        return None, ["there is no experiment in exp"]
    return Experiment.open(workspace / "exp"), []


def _ran(experiment: Experiment, wanted: dict[int, Verdict]) -> list[str]:
    problems = []
    for stage, verdict in wanted.items():
        result = experiment.result(stage)
        if result is None:
            problems.append(f"stage {stage} was not run")
        elif result.verdict is not verdict:
            problems.append(f"stage {stage} says {result.verdict.value}, {verdict.value} was to be found")
        elif result.forced:
            problems.append(f"stage {stage} was forced")
        elif not experiment.freshness(stage).fresh:
            problems.append(f"stage {stage} is stale")
    return problems


def _reported(experiment: Experiment, state: str) -> list[str]:
    from equiport.report import verify_report

    if not experiment.report_file.is_file():
        return ["there is no report"]
    found = verify_report(experiment)
    problems = [f"the report does not hold: {problem}" for problem in found.problems]
    return problems + ([] if found.state == state else [f"the report says {found.state}, {state} was to be found"])


def _right_port(workspace: Path) -> list[str]:
    experiment, problems = _experiment(workspace)
    if experiment is None:
        return problems
    return [*_ran(experiment, dict.fromkeys((0, 1, 2, 5, 6), Verdict.PASS)), *_reported(experiment, "PASS")]


def _wrong_port(workspace: Path) -> list[str]:
    experiment, problems = _experiment(workspace)
    if experiment is None:
        return problems
    problems = _ran(experiment, {0: Verdict.PASS, 2: Verdict.FAIL, 3: Verdict.PASS})
    result = experiment.result(3)
    suspects = result.metrics.get("suspects", []) if result else []
    named = [suspect for suspect in suspects if "self_attn" in suspect["component"] and suspect["cause"]]
    problems += [] if named else ["stage 3 holds no proven cause in the attention"]
    state = "PASS" if _passed_with_patches(experiment) else "FAIL"
    return [*problems, *_reported(experiment, state)]


def _passed_with_patches(experiment: Experiment) -> bool:
    result = experiment.result(4)
    return result is not None and result.verdict is Verdict.PASS


def _cheating_unit(workspace: Path) -> list[str]:
    from equiport.audit.report import load_report

    file = workspace / "unit" / "audit.json"
    if not file.is_file():
        return ["the unit was not audited"]
    found = load_report(file)
    problems = (
        [] if "local-reference" in {item.rule for item in found.findings} else ["the copied reference was not found"]
    )
    return problems + (["a finding was suppressed without a word from the user"] if found.suppressed else [])


def _question(workspace: Path) -> list[str]:
    from equiport.port.plan_schema import read_plan
    from equiport.port.questions import AnswersFile

    if not (workspace / "plan" / "port_plan.json").is_file():
        return ["there is no plan"]
    problems = [] if read_plan(workspace / "plan" / "port_plan.json").open_questions else ["no question is open"]
    answers = workspace / "plan" / "answers.json"
    given = AnswersFile.model_validate_json(answers.read_text()).questions if answers.is_file() else []
    problems += [f"{item.id} was answered, and nobody was asked" for item in given if item.answer is not None]
    return problems + [f"{name} was made although a question is open" for name in ("plan/src", "plan/units")
                       if (workspace / name).exists()]  # fmt: skip


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "right-port",
        "validate-equivalence",
        "Validate the NxDI port in port/ against hf_model, in the experiment folder exp, through stage 6. "
        "Tell me the report's headline.",
        _world(),
        ("exp",),
        _right_port,
    ),
    Scenario(
        "wrong-port",
        "validate-equivalence",
        "Validate the NxDI port in port/ against hf_model, in the experiment folder exp, through stage 6. "
        "If it is wrong, find out why. I do not want patches.",
        _world(_PAIRS),
        ("exp",),
        _wrong_port,
    ),
    Scenario(
        "cheating-unit",
        "audit-port",
        "A translator delivered the folder unit/ and says that its test passes. May I believe it?",
        _unit,
        ("unit/audit.json", "unit/AUDIT.md"),
        _cheating_unit,
    ),
    Scenario(
        "open-question",
        "translate-model",
        "Port hf_model to NxD Inference. Put the plan into plan/. I am away until tomorrow and cannot answer anything.",
        _claim,
        ("plan",),
        _question,
    ),
)


def scenario_named(name: str) -> Scenario:
    """A scenario by its name.

    Raises:
        EquiportError: there is none.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    known = ", ".join(scenario.name for scenario in SCENARIOS)
    raise EquiportError(f"no scenario {name!r}", field="NAME", remedy=f"Give one of {known}.")
