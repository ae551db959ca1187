"""The plan: what it says of a model, when it asks, and how answers come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from equiport.port.fingerprint import OpenQuestion
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.plan_blocks import BLOCKS, available_recipes, folder_of
from equiport.port.plan_schema import read_plan, write_plan
from equiport.port.questions import read_answers, write_answers

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine_of_mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if self.config.shout_factor:
            output.logits = output.logits * self.config.shout_factor
        return output
"""


def folder_of_model(folder: Path, **keys: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **keys}))
    return folder


def equiport(*flags: object) -> subprocess.CompletedProcess[str]:
    code = "from equiport.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_a_llama_is_planned_whole(tmp_path: Path) -> None:
    made = plan(fingerprint(folder_of_model(tmp_path / "m")), "nxdi")
    assert made.ready and not made.unsupported
    blocks = [item.block for item in made.substitutions]
    assert blocks == ["embedding.tokens", "norm.rmsnorm", "norm.rmsnorm", "norm.rmsnorm", "rope.default",
                      "attention.gqa", "mlp.gated", "layer.pre_norm", "head.lm_head"]  # fmt: skip
    assert {unit.id for unit in made.units} == {"attention", "position", "mlp", "embedding_norm", "layer"}
    assert made.reference.name == "Llama"
    kinds = {attribute.name: attribute.kind for attribute in made.config_attributes}
    assert kinds["hidden_size"] == "verbatim"
    assert kinds["head_dim"] == "derived"  # config.json leaves it out


def test_contracts_are_what_the_source_blocks_take(tmp_path: Path) -> None:
    made = plan(fingerprint(folder_of_model(tmp_path / "m")), "nxdi")
    unit = next(unit for unit in made.units if unit.id == "mlp")
    (contract,) = unit.contracts
    assert [spec.shape for spec in contract.inputs] == [("B", "T", "hidden_size")]
    assert [spec.shape for spec in contract.outputs] == [("B", "T", "hidden_size")]
    attention = next(unit for unit in made.units if unit.id == "attention").contracts[0]
    named = {spec.name: spec.shape for spec in attention.inputs}
    assert named["hidden_states"] == ("B", "T", "hidden_size")
    assert named["position_embeddings[0]"] == ("B", "T", "head_dim")


def test_expert_model_names_blocks_without_a_recipe(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mixtral", num_hidden_layers=2).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    made = plan(fingerprint(tmp_path), "nxdi")
    assert "moe.softmax_topk" in [item.block for item in made.substitutions]
    assert "moe.softmax_topk" in made.missing_recipes or "moe.softmax_topk" in available_recipes("nxdi")
    assert made.reference.name == "Qwen3 MoE"


def test_recipes_are_the_folders_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "nxdi" / folder_of("norm.rmsnorm")).mkdir(parents=True)
    (tmp_path / "recipes" / "nxdi" / "no_such_block").mkdir()
    monkeypatch.setattr("equiport.port.plan_blocks.content_dir", lambda _: tmp_path)
    assert available_recipes("nxdi") == {"norm.rmsnorm"}
    made = plan(fingerprint(folder_of_model(tmp_path / "m")), "nxdi")
    assert "norm.rmsnorm" not in made.missing_recipes and "attention.gqa" in made.missing_recipes


def test_block_ids_and_folders_are_one_to_one() -> None:
    assert len({folder_of(block) for block in BLOCKS}) == len(BLOCKS)


def test_plan_survives_its_file(tmp_path: Path) -> None:
    made = plan(fingerprint(folder_of_model(tmp_path / "m", attention_bias=True)), "nxdi")
    assert read_plan(write_plan(tmp_path, made)) == made


def test_a_key_that_the_source_ignores_but_config_sets_is_asked(tmp_path: Path) -> None:
    found = fingerprint(folder_of_model(tmp_path / "m", sliding_window=32))
    assert [question.id for question in found.questions] == ["disagree.sliding_window"]
    made = plan(found, "nxdi")
    assert not made.ready
    answered = plan(found, "nxdi", {"disagree.sliding_window": "source"})
    assert answered.ready and answered.answers == {"disagree.sliding_window": "source"}
    assert not plan(found, "nxdi", {"disagree.sliding_window": "stop"}).ready


def test_stored_weights_of_another_architecture_are_asked(tmp_path: Path) -> None:
    folder = folder_of_model(tmp_path / "m")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    state = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    assert not fingerprint(folder).questions
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors")
    asked = {question.id: question for question in fingerprint(folder).questions}
    assert set(asked) == {"weights.missing", "weights.unexpected"}
    assert "norm.weight" in asked["weights.missing"].question
    assert "layers.{i}.self_attn.q_proj.bias" in asked["weights.unexpected"].question


def remote(folder: Path, **keys: object) -> Path:
    folder_of_model(
        folder, model_type="mine_of_mine", shout_factor=1.5,
        auto_map={"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"},
        **keys,
    )  # fmt: skip
    (folder / "modeling_mine.py").write_text(OWN_CODE)
    return folder


def test_remote_code_needs_the_flag_and_an_unknown_key_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = remote(tmp_path / "m")
    refused = equiport("plan", folder, "--out", tmp_path / "out")
    assert refused.returncode == 2
    assert "--trust-remote-code" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    asked = equiport("plan", folder, "--out", tmp_path / "out", "--trust-remote-code")
    assert asked.returncode == 3, asked.stderr
    answers = json.loads((tmp_path / "out" / "answers.json").read_text())
    entries = {entry["id"]: entry for entry in answers["questions"]}
    assert "config.shout_factor" in entries
    assert entries["config.shout_factor"]["choices"] == ["no_effect", "unsupported"]
    for entry in answers["questions"]:
        entry["answer"] = entry["choices"][0]
    entries["config.shout_factor"]["answer"] = "unsupported"
    (tmp_path / "filled.json").write_text(json.dumps(answers))
    done = equiport(
        "plan", folder, "--out", tmp_path / "out", "--trust-remote-code", "--answers", tmp_path / "filled.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = read_plan(tmp_path / "out" / "port_plan.json")
    assert made.answers["config.shout_factor"] == "unsupported"
    assert any(part.what == "config.shout_factor" for part in made.unsupported)
    page = (tmp_path / "out" / "PORT_PLAN.md").read_text()
    assert "config.shout_factor" in page and "LlamaAttention" in page


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no folder", "no such model folder"),
        ("no config", "config.json: no such file"),
        ("broken", "is no JSON"),
        ("no type", "model_type: missing"),
        ("odd type", "model_type: must be a text"),
        ("unknown type", "is unknown to transformers"),
        ("bad value", "config.json"),
        ("stack", "no plan can be made for stack 'tpu'"),
        ("no answers", "no such file"),
        ("bad answers", "is none of"),
        ("stray answers", "is asked by nobody"),
    ],
)
def test_bad_input_is_one_line(case: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "m" if case == "no folder" else folder_of_model(tmp_path / "m")
    flags: list[object] = ["--out", tmp_path / "out"]
    config = folder / "config.json"
    if case == "no config":
        config.unlink()
    elif case == "broken":
        config.write_text("{")
    elif case == "no type":
        config.write_text(json.dumps({**LLAMA, "model_type": None}))
    elif case == "odd type":
        folder_of_model(folder, model_type=7)
    elif case == "unknown type":
        folder_of_model(folder, model_type="no_such_thing")
    elif case == "bad value":
        folder_of_model(folder, num_attention_heads="many")
    elif case == "stack":
        flags += ["--stack", "tpu"]
    elif case == "no answers":
        flags += ["--answers", tmp_path / "none.json"]
    elif case == "bad answers":
        folder_of_model(folder, sliding_window=32)
        entry = {"id": "disagree.sliding_window", "answer": "perhaps"}
        (tmp_path / "a.json").write_text(json.dumps({"questions": [entry]}))
        flags += ["--answers", tmp_path / "a.json"]
    elif case == "stray answers":
        (tmp_path / "a.json").write_text(json.dumps({"questions": [{"id": "config.x", "answer": "no_effect"}]}))
        flags += ["--answers", tmp_path / "a.json"]
    result = equiport("plan", folder, *flags)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "internal error" not in result.stderr


def test_answers_keep_what_was_said(tmp_path: Path) -> None:
    questions = (OpenQuestion("a", "?", (), ("x", "y")), OpenQuestion("b", "?", (), ()))
    file = write_answers(tmp_path / "answers.json", questions, {"a": "y"})
    assert read_answers(file, questions) == {"a": "y"}
