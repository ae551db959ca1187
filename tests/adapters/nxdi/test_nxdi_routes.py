"""Real ports are made in several ways; what has to be supplied is noted, and never changes what a port computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT

from equiport.errors import EquiportError
from equiport.stacks.contract import LoadReport, StackAdapter

# a config as many ports read it: by hand, with the fields that it thinks of
_BY_HAND = """
class {name}(LlamaInferenceConfig):
    @classmethod
    def from_pretrained(cls, model_path, neuron_config=None, **kwargs):
        import json
        with open(os.path.join(model_path, "config.json")) as opened:
            params = json.load(opened)
        wanted = list(cls.get_required_attributes(cls)) + ["head_dim", "pad_token_id", "rope_theta"]
        fields = dict((key, params.get(key)) for key in wanted)
        fields["rope_theta"] = fields["rope_theta"] or 10000.0
        made = cls(neuron_config=neuron_config, **fields)
        made.__dict__.pop("hidden_act", None)
        return made

    def get_required_attributes(self):
        return [name for name in LlamaInferenceConfig.get_required_attributes(self) if name != "hidden_act"]

class {causal}(NeuronLlamaForCausalLM):
    @classmethod
    def get_config_cls(cls):
        return {name}
"""
_SAMPLING = """
class SamplingNeuronConfig(LlamaNeuronConfig):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.on_device_sampling_config is None:
            self.on_device_sampling_config = object()

class SamplingConfig(LlamaInferenceConfig):
    @classmethod
    def get_neuron_config_cls(cls):
        return SamplingNeuronConfig
"""


def port_with(tmp_path: Path, stem: str, extra: str) -> Path:
    path = tmp_path / f"modeling_{stem}.py"
    path.write_text(f"{PORT.read_text()}\n{extra}")
    return path


def load(
    adapter: StackAdapter, port: Path, folder: Path, causal: str = CAUSAL, config: str = CONFIG
) -> tuple[Any, LoadReport]:
    model = adapter.create_model(port, causal, config, folder, dtype=torch.float32, batch_size=1, seq_len=16)
    return model, adapter.load_weights(model, folder, torch.float32)


def logits(adapter: StackAdapter, model: Any) -> torch.Tensor:
    return adapter.forward(model, torch.tensor([[5, 7, 11]]))


def test_a_plain_port_has_no_notes(adapter: StackAdapter, plain_folder: Path) -> None:
    assert load(adapter, PORT, plain_folder)[1].notes == ()


def test_an_attribute_on_which_the_port_stops_is_supplied_and_noted(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path
) -> None:
    port = port_with(tmp_path, "lacking", _BY_HAND.format(name="LackingConfig", causal="LackingForCausalLM"))
    model, report = load(adapter, port, plain_folder, "LackingForCausalLM", "LackingConfig")
    assert report.clean and len(report.notes) == 1
    assert "LackingConfig lacks hidden_act" in report.notes[0] and "silu" in report.notes[0]
    plain, _ = load(adapter, PORT, plain_folder)
    assert torch.equal(logits(adapter, model), logits(adapter, plain))


def test_a_default_of_the_port_itself_stands(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    """A port that goes on without the field computes what it computes: nothing is supplied behind its back."""
    text = _BY_HAND.format(name="QuietConfig", causal="QuietForCausalLM")
    quiet = port_with(tmp_path, "quiet", text)
    source = quiet.read_text()
    assert "config.hidden_act" in source
    quiet.write_text(source.replace("config.hidden_act", "getattr(config, 'hidden_act', 'gelu')"))
    model, report = load(adapter, quiet, plain_folder, "QuietForCausalLM", "QuietConfig")
    assert report.notes == ()
    plain, _ = load(adapter, PORT, plain_folder)
    assert not torch.allclose(logits(adapter, model), logits(adapter, plain), rtol=1e-3, atol=1e-3)


def test_an_attribute_that_the_source_lacks_too_is_an_error(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path
) -> None:
    port = port_with(tmp_path, "unknown_field", "")
    port.write_text(port.read_text().replace("config.hidden_act", "config.no_such_setting"))
    with pytest.raises(EquiportError, match="no_such_setting"):
        load(adapter, port, plain_folder)


def test_sampling_that_a_port_forces_is_switched_off(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    port = port_with(tmp_path, "sampling", _SAMPLING)
    model, report = load(adapter, port, plain_folder, config="SamplingConfig")
    assert len(report.notes) == 1 and "samples on the device by itself" in report.notes[0]
    assert logits(adapter, model).shape == (1, model.config.vocab_size)


def test_siblings_by_the_name_of_the_folder(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    """Two ports, each with a package `src` of its own: neither sees the other's siblings."""
    for mark in ("one", "two"):
        folder = tmp_path / mark / "src"
        folder.mkdir(parents=True)
        (folder / "settings.py").write_text(f"MARK = {mark!r}\n")
        shutil.copy(PORT, folder / "modeling_own.py")
        with (folder / "modeling_own.py").open("a") as opened:
            opened.write("\nfrom src.settings import MARK\n")
    for mark in ("three", "four"):
        folder = tmp_path / mark / "src"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "settings.py").write_text(f"MARK = {mark!r}\n")
        (folder / "modeling_own.py").write_text("from .settings import MARK\n")
    for mark in ("one", "two", "three", "four", "one"):
        assert mark == adapter.import_port(tmp_path / mark / "src" / "modeling_own.py").MARK


def test_the_former_signature_of_the_norm(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    from neuronx_distributed_inference.models.llama import modeling_llama

    if not hasattr(modeling_llama, "get_rmsnorm_cls"):
        pytest.skip("this tier has no get_rmsnorm_cls")
    extra = (
        "\nfrom neuronx_distributed_inference.models.llama.modeling_llama import get_rmsnorm_cls\n"
        "def norm_of(size):\n    return get_rmsnorm_cls()(size, eps=1e-5)\n"
    )
    port = adapter.import_port(port_with(tmp_path, "former_norm", extra))
    norm, stream = port.norm_of(8), torch.randn(2, 8)
    assert torch.allclose(norm(stream), stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-5), atol=1e-6)
    assert "get_rmsnorm_cls()" in port._equiport_notes[0]
    assert not hasattr(modeling_llama.get_rmsnorm_cls, "_equiport_old")  # the stack itself is as it was


def test_a_parameter_of_two_names_is_not_missing(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    port = port_with(tmp_path, "two_names", "")
    source = port.read_text()
    line = next(text for text in source.splitlines() if "self.norm = " in text)
    indent = line[: len(line) - len(line.lstrip())]
    port.write_text(source.replace(line, f"{line}\n{indent}self.norm.second_name = self.norm.weight"))
    model, report = load(adapter, port, plain_folder)
    assert any(key.endswith("norm.second_name") for key in adapter.inner_model(model).state_dict())
    assert report.clean


def test_config_json_is_left_alone(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    before = json.loads((plain_folder / "config.json").read_text())
    port = port_with(tmp_path, "lacking_again", _BY_HAND.format(name="AgainConfig", causal="AgainForCausalLM"))
    load(adapter, port, plain_folder, "AgainForCausalLM", "AgainConfig")
    assert json.loads((plain_folder / "config.json").read_text()) == before
