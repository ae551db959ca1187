"""Every unit by agents, the decoder layer last: what recipes make stands in for what agents write.

The model is a function here; the toolkit's checks, tests and the assembly are real.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equiport.agents.backend import Job, JobResult
from equiport.bench.family_models import write_model
from equiport.errors import ExitCode
from equiport.fixtures.folder import read_config
from equiport.fixtures.tiny_config import tiny_config
from equiport.port import port_run
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.port_run import PortOptions, run_port
from equiport.port.scaffold_source import definitions, imports_of
from equiport.port.translate import UnitRequest
from equiport.port.translate_recipes import RecipeTranslator

from .fake_backend import DONE, FakeBackend


def written(source: Path) -> dict[str, tuple[str, str]]:
    """Unit -> (block, test), in the form that agents are asked for."""
    made = plan(fingerprint(source), "nxdi")
    config = tiny_config(read_config(source)).config
    files = {}
    for unit in made.units:
        found = RecipeTranslator().translate(UnitRequest(made, unit, source, source, config))
        block, test = (
            found.block,
            found.test.replace("nxdi_block.LlamaInferenceConfig", "port_config.LlamaInferenceConfig"),
        )
        kept = [item for item in definitions(block) if item.name != "LlamaInferenceConfig"]
        heads = ["from port_config import LlamaInferenceConfig", *imports_of(block)]
        if unit.kind == "layer":
            kept = [item for item in kept if item.name == "NeuronLlamaDecoderLayer"]
            heads.append("from parts import NeuronLlamaMLP, make_rmsnorm")
            test = test.replace("nxdi_block.NeuronLlamaAttention", "parts.NeuronLlamaAttention")
            test = test.replace("import nxdi_block", "import parts\nimport nxdi_block")
        test = test.replace("import nxdi_block", "import port_config\nimport nxdi_block")
        body = "\n\n\n".join(item.text for item in kept)
        files[unit.id] = ("from __future__ import annotations\n" + "\n".join(heads) + f"\n\n\n{body}\n", test)
    return files


@pytest.mark.slow
def test_all_units_by_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_model("llama", tmp_path / "model"), tmp_path / "out"
    files = written(source)

    def answer(job: Job) -> JobResult:
        block, test = files[job.access.workspace.name]
        if job.name.startswith("unit layer"):
            assert (job.access.workspace / "parts.py").is_file() and "from parts" not in job.system
        (job.access.workspace / "nxdi_block.py").write_text(block)
        (job.access.workspace / "test_block.py").write_text(test)
        return DONE

    backend = FakeBackend(answer)
    monkeypatch.setattr(port_run, "_experiment", lambda *_: ExitCode.PASS)
    assert run_port(PortOptions(source, out, engine="agent"), backend) is ExitCode.PASS
    assert sorted(backend.names) == sorted(f"unit {unit}, attempt 1" for unit in files)
    assert backend.names[-1] == "unit layer, attempt 1"
    port = (out / "src" / "modeling_llama_nxdi.py").read_text()
    for name in ("class NeuronLlamaAttention(", "class NeuronLlamaMLP(", "class NeuronLlamaDecoderLayer("):
        assert port.count(name) == 1
    assert "port_config" not in port and "parts" not in port
    state = json.loads((out / "port_state.json").read_text())
    assert {step["status"] for step in state["steps"].values()} == {"done"}
    assert state["costs"]["usd"] == pytest.approx(2.5)
    # again: nothing is asked, nothing is made
    assert run_port(PortOptions(source, out, engine="agent"), backend) is ExitCode.PASS
    assert len(backend.ran) == 5
