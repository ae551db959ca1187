"""Every contributed port of the public tree is inspected: no fault of ours, and the kinds that reading them gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from equiport.errors import OpenQuestionError
from equiport.intake.inspection import PortInspection, inspect_port
from equiport.intake.kinds import PortKind

_GIVEN = os.environ.get("EQUIPORT_NXDI_SRC")
pytestmark = pytest.mark.skipif(not _GIVEN, reason="EQUIPORT_NXDI_SRC is not set: no tree of contributed ports")
#: judged by reading the files
KINDS = {
    "Qwen2-7B-Instruct": PortKind.DECODER, "gpt2": PortKind.DECODER, "biogpt": PortKind.DECODER,
    "falcon-7b": PortKind.DECODER, "xglm-564M": PortKind.DECODER, "SmolLM3-3B": PortKind.DECODER,
    "orion-14b-chat": PortKind.DECODER, "internlm3-8b-instruct": PortKind.DECODER, "MiniCPM4-8B": PortKind.DECODER,
    "granite-3.1-8b-instruct": PortKind.DECODER, "DeepSeek-V3": PortKind.MOE, "GLM-5.2": PortKind.MOE,
    "MiniMax-M3": PortKind.MOE, "Mixtral-8x7B-Instruct-v0.1": PortKind.MOE, "Phi-3.5-MoE-instruct": PortKind.MOE,
    "Trinity": PortKind.MOE, "Falcon-H1-0.5B-Instruct": PortKind.HYBRID, "lfm2-2.6b": PortKind.HYBRID,
    "recurrentgemma-2b-it": PortKind.HYBRID, "llava-v1.5-7b": PortKind.VISION, "idefics-9b-instruct": PortKind.VISION,
    "Qwen2.5-VL-32B-Instruct": PortKind.VISION, "Qwen3-VL-8B-Thinking": PortKind.VISION, "chandra": PortKind.VISION,
    "Janus-1.3B": PortKind.VISION, "Mistral-Small-3.1-24B-Instruct-2503": PortKind.VISION,
    "LaughterSegmentation": PortKind.AUDIO, "LeVo-2-SongGeneration": PortKind.AUDIO, "ZUNA": PortKind.DIFFUSION,
}  # fmt: skip
TYPES = {
    "AFM-4.5B-Base": "arcee", "Llama-2-7b-hf": "llama", "Ministral-4b-instruct": "mistral", "pythia-2.8b": "gpt_neox",
    "OLMo-2-0425-1B-Instruct": "olmo2", "gemma-3-1b-it": "gemma3_text", "hunyuan-7b-instruct": "hunyuan_v1_dense",
    "openai-gpt": "openai-gpt", "GLM-4-9B-0414": "glm4", "Janus-1.3B": "llama", "GLM-5.2": "glm_moe_dsa",
}  # fmt: skip


def _tree() -> Path:
    root = Path(_GIVEN or "").expanduser()
    return next((place / "contrib" / "models" for place in (root, root.parent) if (place / "contrib").is_dir()), root)


def test_every_port() -> None:
    files = sorted(_tree().glob("*/src/**/modeling_*.py"))
    if not files:
        pytest.skip("the given sources hold no contrib/models")
    found: dict[str, list[PortInspection]] = {}
    asked = set()
    for file in files:
        name = file.relative_to(_tree()).parts[0]
        try:
            inspected = inspect_port(file)
        except OpenQuestionError as question:
            assert "--" in question.line()
            asked.add(name)
            continue
        assert inspected.obstacle or inspected.tiny, file
        found.setdefault(name, []).append(inspected)
    assert asked == {"glm-4-9b-chat-hf"}
    for name, kind in KINDS.items():
        if name in found:
            assert kind in {inspected.kind for inspected in found[name]}, name
    for name, model_type in TYPES.items():
        if name in found:
            assert model_type in {inspected.model_type for inspected in found[name]}, name
    helium = found.get("helium-1-2b")
    assert not helium or "helium_config" in str(helium[0].obstacle)
