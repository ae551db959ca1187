"""What a user gets wrong is one clear line that names the file, the field and the way on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, INNER, PORT

from equiport.errors import EquiportError, ExitCode
from equiport.stacks.contract import NotOffered, StackAdapter
from equiport.stacks.loading import load_adapter


def create(adapter: StackAdapter, folder: Path, port: Path = PORT, name: str = CAUSAL, **kw: Any) -> Any:
    settings = {"dtype": torch.float32, "batch_size": 2, "seq_len": 16, **kw}
    return adapter.create_model(port, name, settings.pop("config", CONFIG), folder, **settings)


@pytest.fixture(scope="module")
def model(adapter: StackAdapter, plain_folder: Path) -> Any:
    made = create(adapter, plain_folder)
    assert adapter.load_weights(made, plain_folder, torch.float32).clean
    return made


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch\nimport no_such_package_x\n", r"bad_port\.py:2: does not import: ModuleNotFoundError"),
        ("x = 1\nraise RuntimeError('at import')\n", r"bad_port\.py:2: does not import: RuntimeError: at import"),
        ("def broken(:\n", r"bad_port\.py: is not Python"),
        ("class Other: pass\n", r"has no class 'NeuronLlamaForCausalLM'\. Classes that it defines: Other"),
        ("NeuronLlamaForCausalLM = LlamaInferenceConfig = 3\n", "has no class 'NeuronLlamaForCausalLM'"),
    ],
)
def test_modeling_files(adapter: StackAdapter, plain_folder: Path, tmp_path: Path, source: str, message: str) -> None:
    port = tmp_path / "bad_port.py"
    port.write_text(source)
    with pytest.raises(EquiportError, match=message) as raised:
        create(adapter, plain_folder, port)
    assert "\n" not in raised.value.line()
    assert raised.value.exit_code is ExitCode.BAD_INPUT


def test_a_corrected_file_is_read_again(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    port = tmp_path / "modeling_mended.py"
    port.write_text("import no_such_package_x\n")
    with pytest.raises(EquiportError, match="does not import"):
        create(adapter, plain_folder, port)
    port.write_text(PORT.read_text())
    os.utime(port, (1, 1))  # another time than the cached bytecode's, whatever the clock's grain
    assert type(create(adapter, plain_folder, port)).__module__ == "modeling_mended"


def test_two_ports_of_the_same_name_do_not_mix(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    for mark in ("one", "two"):
        (tmp_path / mark).mkdir()
        text = PORT.read_text().replace("import math", "import math\nfrom marks import MARK")
        (tmp_path / mark / "modeling_same.py").write_text(text)
        (tmp_path / mark / "marks.py").write_text(f"MARK = {mark!r}\n")
    for mark in ("one", "two", "one"):
        made = create(adapter, plain_folder, tmp_path / mark / "modeling_same.py")
        assert mark == __import__(type(made).__module__).MARK


def test_a_port_with_relative_imports(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    package = tmp_path / "port_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "norms.py").write_text("from transformers.models.llama.modeling_llama import LlamaRMSNorm\n")
    old = "from transformers.models.llama.modeling_llama import LlamaRMSNorm"
    (package / "modeling_relative.py").write_text(PORT.read_text().replace(old, "from .norms import LlamaRMSNorm"))
    assert create(adapter, plain_folder, package / "modeling_relative.py").config.hidden_size == 64


@pytest.mark.parametrize("name", ["LlamaInferenceConfig", "NeuronLlamaMLP"])
def test_classes_of_another_kind(adapter: StackAdapter, plain_folder: Path, name: str) -> None:
    with pytest.raises(EquiportError, match=f"class '{name}' (does not derive|derives neither)"):
        create(adapter, plain_folder, name=name)
    with pytest.raises(EquiportError, match="has no class 'NoConfig'"):
        create(adapter, plain_folder, config="NoConfig")


def test_a_config_without_a_field(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(plain_folder, folder)
    port = tmp_path / "modeling_wants.py"
    port.write_text(
        PORT.read_text().replace('"hidden_act",\n        ]', '"hidden_act",\n "window_of_mine",\n        ]')
    )
    with pytest.raises(EquiportError, match=r"config\.json: window_of_mine: .*needs window_of_mine.*Add the field"):
        create(adapter, folder, port)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content)[:-9])
    with pytest.raises(EquiportError, match=r"config\.json: is no JSON"):
        create(adapter, folder)
    (folder / "config.json").unlink()
    with pytest.raises(EquiportError, match=r"config\.json: no such file"):
        create(adapter, folder)


def test_a_setting_that_the_port_refuses(adapter: StackAdapter, plain_folder: Path) -> None:
    with pytest.raises(EquiportError, match=r"max_context_length"):
        create(adapter, plain_folder, neuron_config={"max_context_length": 99})
    with pytest.raises(NotOffered, match="takes no bath_size"):
        create(adapter, plain_folder, bath_size=3)


def test_tensor_parallel_without_ranks(adapter: StackAdapter, plain_folder: Path) -> None:
    with pytest.raises(EquiportError, match="tp_degree: 2 tensor-parallel ranks .*torchrun"):
        create(adapter, plain_folder, tp_degree=2)
    with pytest.raises(EquiportError, match="dtype: torch.float16"):
        create(adapter, plain_folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("ids", "kw", "message"),
    [
        ([[1, 2]], {}, "1 rows for a model made for 2"),
        ([[1, 2], [3, 200]], {}, "token 200 is outside the vocabulary of 128"),
        ([[1] * 17, [2] * 17], {}, "needs 17 positions"),
        ([[1, 2], [3, 4]], {"lengths": torch.tensor([0, 2])}, "lengths"),
        ([[1, 2], [3, 4]], {"lengths": torch.tensor([3, 2])}, "do not fit in 2"),
        ([[1], [3]], {"positions": torch.tensor([3])}, "one value a row"),
        ([[1], [3]], {"positions": torch.tensor([3, 16])}, "needs 17 positions"),
        ([[1, 1], [3, 3]], {"positions": torch.tensor([3, 3])}, "takes one token a row"),
        ([[1], [3]], {"positions": torch.tensor([3, 3]), "lengths": torch.tensor([1, 1])}, "not both"),
    ],
)
def test_forward(adapter: StackAdapter, model: Any, ids: list[list[int]], kw: dict[str, Any], message: str) -> None:
    with pytest.raises(EquiportError, match=message):
        adapter.forward(model, torch.tensor(ids), **kw)
    with pytest.raises(NotOffered, match="takes no mask"):
        adapter.forward(model, torch.tensor([[1], [2]]), mask=1)


def test_forward_too_early(adapter: StackAdapter, plain_folder: Path) -> None:
    made = create(adapter, plain_folder)
    ids = torch.tensor([[1, 2], [3, 4]])
    with pytest.raises(EquiportError, match="no weights yet"):
        adapter.forward(made, ids)
    adapter.load_weights(made, plain_folder, torch.float32)
    with pytest.raises(EquiportError, match="decode without a prefill"):
        adapter.forward(made, ids[:, :1], positions=torch.tensor([2, 2]))


def test_structure_without_weights(adapter: StackAdapter, plain_folder: Path) -> None:
    inner = adapter.inner_model(create(adapter, plain_folder))
    assert type(inner).__name__ == INNER
    assert "layers.2.mlp.down_proj" in dict(inner.named_modules())


def test_a_compiled_folder_without_a_device(adapter: StackAdapter, tmp_path: Path) -> None:
    (tmp_path / "neuron_config.json").write_text("{}")
    with pytest.raises(NotOffered, match="needs a Neuron device.*CPU mode"):
        adapter.device_inference(str(tmp_path), 1, [[1]], 1)


def test_device_inference_input(adapter: StackAdapter, plain_folder: Path, model: Any, tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="the port is not named"):
        adapter.device_inference(str(plain_folder), 1, [[1]], 1)
    with pytest.raises(EquiportError, match="an empty prompt"):
        adapter.device_inference(str(plain_folder), 1, [[1], []], 1, model=model)
    with pytest.raises(NotOffered, match="takes no temperature"):
        adapter.device_inference(str(plain_folder), 1, [[1]], 1, model=model, temperature=1.0)
    port = tmp_path / "modeling_forgetful.py"
    port.write_text(PORT.read_text().replace("converted = {name: value", "converted = {name + 'x': value"))
    with pytest.raises(EquiportError, match="conversion fails|weights did not all arrive"):
        adapter.device_inference(
            str(plain_folder), 1, [[1]], 1, target_module_file=port, target_class_name=CAUSAL,
            target_config_name=CONFIG, dtype=torch.float32,
        )  # fmt: skip


def test_cleanup_restores_the_environment(monkeypatch: pytest.MonkeyPatch, adapter: StackAdapter) -> None:
    adapter.cleanup()
    if torch.distributed.is_initialized():  # of an adapter that another test file left
        torch.distributed.destroy_process_group()
    monkeypatch.setenv("NXD_CPU_MODE", "0")
    monkeypatch.delenv("NXD_LOG_LEVEL", raising=False)
    other = load_adapter("nxdi")
    other.init_distributed()
    other.init_distributed()
    assert os.environ["NXD_CPU_MODE"] == "1"
    assert torch.distributed.is_initialized()
    other.cleanup()
    assert os.environ["NXD_CPU_MODE"] == "0"
    assert "NXD_LOG_LEVEL" not in os.environ
    assert not torch.distributed.is_initialized()
    adapter.init_distributed()
