"""Small modeling files, each of another kind, as ports of that kind begin."""

from __future__ import annotations

from pathlib import Path

HEAD = """
from torch import nn
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
"""


def decoder(name: str, extra: str = "", head: str = "") -> str:
    """A decoder port whose classes are called after `name`."""
    return f"""{HEAD}{head}
{extra}
class {name}InferenceConfig(InferenceConfig): pass
class Neuron{name}Model(NeuronBaseModel): pass
class Neuron{name}ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = Neuron{name}Model
    @classmethod
    def get_config_cls(cls):
        return {name}InferenceConfig
"""


def write(folder: Path, text: str, *, name: str = "modeling_x.py", readme: str = "") -> Path:
    """The modeling file in FOLDER/src, with a README above it when there are words for one."""
    source = folder / "src"
    source.mkdir(parents=True, exist_ok=True)
    (source / name).write_text(text)
    if readme:
        (folder / "README.md").write_text(readme)
    return source / name
