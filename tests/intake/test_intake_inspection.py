"""A port is told by what its files say: kind, counterpart and obstacle, and a question where several fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from port_files import decoder, write

from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.fixtures.folder import read_config
from equiport.intake.inspection import inspect_port
from equiport.intake.kinds import PortKind
from equiport.intake.source import source_folder
from equiport.reference.model import load_reference

KINDS = {
    "decoder": (decoder("Qwen3"), PortKind.DECODER, "qwen3"),
    "MoE": (decoder("Mixtral"), PortKind.MOE, "mixtral"),
    "hybrid": (decoder("FalconH1"), PortKind.HYBRID, "falcon_h1"),
    "recurrent": (decoder("RecurrentGemma"), PortKind.HYBRID, "recurrent_gemma"),
    "encoder-decoder": (decoder("T5"), PortKind.ENCODER_DECODER, "t5"),
    "vision by its imports": (
        decoder("Llava", head="from transformers import CLIPVisionModel"), PortKind.VISION, "llama",
    ),
    "vision by its counterpart": (decoder("Qwen3VL"), PortKind.VISION, "qwen3_vl"),
    "audio": (
        "from transformers import Wav2Vec2ForAudioFrameClassification\nclass Pipeline: pass",
        PortKind.AUDIO, "wav2vec2",
    ),
    "diffusion": (
        "from diffusers import FluxTransformer2DModel\nfrom torch import nn\nclass Backbone(nn.Module): pass",
        PortKind.DIFFUSION, None,
    ),
    "embedding": (
        "from torch import nn\nclass NeuronBgeEncoderModel(nn.Module): pass", PortKind.EMBEDDING, None,
    ),
    "nothing": ("x = 1", PortKind.UNKNOWN, None),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kind_and_counterpart(tmp_path: Path, name: str) -> None:
    text, kind, model_type = KINDS[name]
    found = inspect_port(write(tmp_path, text))
    assert (found.kind, found.model_type) == (kind, model_type), found
    if kind.runs:
        assert found.obstacle is None and found.tiny is not None and found.validated
        assert found.tiny["architectures"] == [found.hf_class]
    if kind not in (PortKind.DECODER, PortKind.UNKNOWN):
        assert found.not_validated
    if found.classes is None:
        assert found.obstacle and found.tiny is None


def test_embeddings_are_told_their_protocol(tmp_path: Path) -> None:
    found = inspect_port(write(tmp_path, KINDS["embedding"][0]))
    assert "cosine" in found.not_validated[0] and "0.999" in found.not_validated[0]


def test_text_decoder_of_a_model_of_several_parts(tmp_path: Path) -> None:
    found = inspect_port(write(tmp_path, decoder("Mistral3")))
    assert (found.kind, found.model_type, found.hf_class) == (PortKind.VISION, "mistral", "MistralForCausalLM")
    assert "text decoder" in found.validated[0] and "vision" in found.not_validated[0]
    assert found.obstacle is None


EVIDENCE = {
    "the imported class outweighs the names": (
        decoder("Ministral", head="from transformers import MistralForCausalLM"), "", "mistral",
    ),
    "a borrowed norm is no counterpart": (
        decoder("Qwen3", head="from transformers.models.llama.modeling_llama import LlamaRMSNorm"), "", "qwen3",
    ),
    "an exact class before the type of the same name": (decoder("Gemma3"), "", "gemma3_text"),
    "class names of another spelling": (decoder("GPTBigCode"), "", "gpt_bigcode"),
    "LMHeadModel": (decoder("OpenAIGPT"), "", "openai-gpt"),
    "the README's class": (decoder("Abc"), "An implementation of `ArceeForCausalLM`.", "arcee"),
    "the README's line": (decoder("Afm"), "- **Architecture:** Arcee (similar to LLaMA)", "arcee"),
    "names and text disagree, the README settles": (
        decoder("Glm4", '# model_type="glm4", other than model_type="glm"'), "Architecture: Glm4ForCausalLM", "glm4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EVIDENCE)
def test_evidence(tmp_path: Path, name: str) -> None:
    text, readme, model_type = EVIDENCE[name]
    assert inspect_port(write(tmp_path, text, readme=readme)).model_type == model_type


def test_several_models_are_a_question_that_model_settles(tmp_path: Path) -> None:
    port = write(tmp_path, decoder("Glm4", '# uses model_type="glm", not model_type="glm4"'))
    with pytest.raises(OpenQuestionError) as asked:
        inspect_port(port)
    assert asked.value.exit_code is ExitCode.INCONCLUSIVE
    assert all(word in asked.value.line() for word in ("glm, glm4", "--model"))
    config = {"model_type": "glm", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 9,
              "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 700, "vocab_size": 900}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json"):
        found = inspect_port(port, model=model)
        assert (found.model_type, found.hf_class) == ("glm", "GlmForCausalLM")
        assert found.tiny is not None and found.tiny["num_hidden_layers"] == 4
        assert any("4 layers of 9" in note for note in found.notes)
        assert not any("default" in note for note in found.notes)


def test_the_default_config_is_said_to_be_one(tmp_path: Path) -> None:
    assert any("default" in note for note in inspect_port(write(tmp_path, decoder("Qwen3"))).notes)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (decoder("Qwen3", head="import missing_sibling_config"), "missing_sibling_config"),
        (decoder("Qwen3", head="from .gone import something"), "gone"),
        (decoder("Qwen3", head="from src.gone import something"), "src.gone"),
        (decoder("NobodyKnows"), "--model"),
        (decoder("Nobody", '# model_type="nobody_v9"'), "nobody_v9"),
    ],
)
def test_obstacles_are_named(tmp_path: Path, text: str, word: str) -> None:
    found = inspect_port(write(tmp_path, text))
    assert found.obstacle is not None and word in found.obstacle


def test_guarded_and_own_modules_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "rope.py").write_text("x = 1")
    head = "from src.rope import x\nfrom .rope import x\ntry:\n    import gone_a\nexcept ImportError:\n    pass\n"
    assert inspect_port(write(tmp_path, decoder("Qwen3", head=head))).obstacle is None


def test_named_classes_must_be_there(tmp_path: Path) -> None:
    port = write(tmp_path, decoder("Qwen3"))
    with pytest.raises(EquiportError, match="NoSuchClass"):
        inspect_port(port, causal_class="NoSuchClass")


@pytest.mark.parametrize(
    "name", ["GPT2", "GPTNeo", "OPT", "XGLM", "GPTJ", "Falcon", "Lfm2", "FalconH1", "HunYuanDenseV1"]
)
def test_source_folders_are_small_and_load(tmp_path: Path, name: str) -> None:
    found = inspect_port(write(tmp_path, decoder(name)))
    folder = source_folder(found, tmp_path / "m")
    model = load_reference(folder, torch.float32)
    assert sum(tensor.numel() for tensor in model.parameters()) < 3_000_000
    assert read_config(folder)["model_type"] == found.model_type
    with torch.no_grad():
        assert model(torch.tensor([[3, 5, 7]])).logits.isfinite().all()


def test_no_folder_without_a_counterpart(tmp_path: Path) -> None:
    found = inspect_port(write(tmp_path, decoder("NobodyKnows")))
    with pytest.raises(EquiportError, match="--model"):
        source_folder(found, tmp_path / "m")
    assert not (tmp_path / "m").exists()
