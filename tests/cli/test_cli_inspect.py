"""`equiport inspect` says what a port is and makes an experiment; `equiport validate` runs without a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, TINY_LLAMA, Cli

EMBEDDING = "from torch import nn\nclass NeuronBgeEncoderModel(nn.Module): pass\n"
QUESTION = '''"""Uses model_type="glm", not model_type="glm4"."""
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
class Glm4InferenceConfig(InferenceConfig): pass
class NeuronGlm4Model(NeuronBaseModel): pass
class NeuronGlm4ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronGlm4Model
'''


def test_the_table(cli: Cli) -> None:
    ran = cli("inspect", EXAMPLE_PORT)
    assert ran.code == 0, ran.err
    for word in (
        "decoder",
        "NeuronLlamaForCausalLM",
        "LlamaForCausalLM (llama)",
        "default config",
        "next-token logits",
    ):
        assert word in " ".join(ran.out.split()), word


def test_out_makes_an_experiment(cli: Cli, tmp_path: Path) -> None:
    ran = cli("inspect", EXAMPLE_PORT, "--out", tmp_path / "exp")
    assert ran.code == 0, ran.err
    config = json.loads((tmp_path / "exp" / "equiv_config.json").read_text())
    assert config["synthetic_weights"] is True
    assert config["TARGET_CAUSAL_CLASS"] == "NeuronLlamaForCausalLM"
    tiny = json.loads((Path(config["SOURCE_MODEL_PATH"]) / "config.json").read_text())
    assert tiny["model_type"] == "llama" and tiny["hidden_size"] < 200


def test_a_model_folder_stays_the_source(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    ran = cli("inspect", EXAMPLE_PORT, "--model", model, "--out", tmp_path / "exp")
    assert ran.code == 0, ran.err
    config = json.loads((tmp_path / "exp" / "equiv_config.json").read_text())
    assert config["SOURCE_MODEL_PATH"] == str(model)
    assert "default config" not in ran.out and not (tmp_path / "exp" / "source").exists()


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_kinds_that_do_not_run_end_with_one_line(cli: Cli, tmp_path: Path, verb: str) -> None:
    port = tmp_path / "modeling_bge.py"
    port.write_text("import neuronx_distributed_inference\n" + EMBEDDING)
    named = [port] if verb == "inspect" else ["--port", port]
    ran = cli(verb, *named, "--out", tmp_path / "exp")
    ran.is_clear_error(2, "embedding", "cosine")
    assert not (tmp_path / "exp").exists()


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_questions_exit_with_3(cli: Cli, tmp_path: Path, verb: str) -> None:
    port = tmp_path / "modeling_glm4.py"
    port.write_text(QUESTION)
    named = [port] if verb == "inspect" else ["--port", port, "--out", tmp_path / "exp"]
    cli(verb, *named).is_clear_error(3, "glm, glm4", "--model")


def test_bad_models_are_one_line(cli: Cli, tmp_path: Path) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("{")
    cli("inspect", EXAMPLE_PORT, "--model", bad).is_clear_error(2, "JSON")
    bad.write_text("{}")
    cli("inspect", EXAMPLE_PORT, "--model", bad).is_clear_error(2, "model_type")
    cli("inspect", tmp_path / "none.py").is_clear_error(2, "no such file")


def test_validate_without_a_model(cli: Cli, tmp_path: Path) -> None:
    ran = cli("validate", "--port", EXAMPLE_PORT, "--out", tmp_path / "exp", "--through", 0)
    assert ran.code in (0, 4), ran.out + ran.err
    assert "a tiny LlamaForCausalLM with synthetic weights" in ran.out
    assert "synthetic weights" in ran.out.splitlines()[-2]
    result = json.loads((tmp_path / "exp" / "results" / "stage0.json").read_text())
    assert result["verdict"] == "PASS"


def test_validate_by_a_config_file(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 30}))
    ran = cli("validate", "--port", EXAMPLE_PORT, "--model", config, "--out", tmp_path / "exp", "--through", 0)
    assert ran.code in (0, 4), ran.out + ran.err
    tiny = json.loads((tmp_path / "exp" / "source" / "config.json").read_text())
    assert tiny["num_hidden_layers"] == 4
