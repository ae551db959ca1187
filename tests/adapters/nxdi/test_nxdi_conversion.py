"""Names of stored tensors that a port's conversion does not read, and views that the stack refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, INNER, PORT
from safetensors.torch import load_file, save_file

from equiport.errors import EquiportError
from equiport.stacks.contract import LoadReport, StackAdapter, Tier

LINE = 'converted = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}'
OLD_NAMES = (
    'converted = {name.removeprefix("model."): value for name, value in state_dict.items() '
    'if name.startswith(("model.", "lm_head."))}'
)
STRIPS_NOTHING = (
    "    _model_cls = NeuronLlamaModel",
    '    _model_cls = NeuronLlamaModel\n    _STATE_DICT_MODEL_PREFIX = ""',
)
VIEWS = (
    LINE + '\n        for name in [name for name in converted if name.endswith("q_proj.weight")]:\n'
    '            both = torch.cat((converted[name], converted[name])).t().contiguous().t()\n'
    '            converted[name], converted[name + "_again"] = both.split(len(converted[name]))'
)  # fmt: skip


def port(folder: Path, *pairs: tuple[str, str]) -> Path:
    text = PORT.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "modeling_names.py"
    path.write_text(text)
    return path


def bare(folder: Path, target: Path) -> Path:
    """The same weights without the prefix of the backbone."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    state = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load(adapter: StackAdapter, folder: Path, file: Path, name: str = CAUSAL) -> LoadReport:
    model = adapter.create_model(file, name, CONFIG, folder, dtype=torch.float32, batch_size=1, seq_len=16)
    return adapter.load_weights(model, folder, torch.float32)


@pytest.mark.parametrize("name", [CAUSAL, INNER])
def test_names_that_the_stack_has_stripped_are_a_fault_and_the_rest_is_judged(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path, name: str
) -> None:
    file = port(tmp_path, (LINE, OLD_NAMES))
    report = load(adapter, plain_folder, file, name)
    assert not report.clean and len(report.faults) == 1 and "'model.'" in report.faults[0]
    assert not report.missing and "layers.1.mlp.up_proj.weight" in report.loaded
    # nothing of it stays behind
    assert load(adapter, plain_folder, PORT, name).clean


def test_the_layout_that_a_port_reads_is_named(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    file, other = port(tmp_path, STRIPS_NOTHING), bare(plain_folder, tmp_path / "bare")
    assert load(adapter, other, file).clean
    with pytest.raises(EquiportError, match="without 'model.'") as caught:
        load(adapter, plain_folder, file)
    assert "both layouts" in caught.value.line()
    reads_whole = port(other, STRIPS_NOTHING, (LINE, OLD_NAMES))
    assert load(adapter, plain_folder, reads_whole).clean
    with pytest.raises(EquiportError, match="with 'model.'"):
        load(adapter, other, reads_whole)


def test_a_tensor_that_is_lacking_is_no_matter_of_layout(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path
) -> None:
    other = bare(plain_folder, tmp_path / "bare")
    state = load_file(other / "model.safetensors")
    del state["layers.0.self_attn.q_proj.weight"]
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EquiportError, match="q_proj") as caught:
        load(adapter, other, port(tmp_path, STRIPS_NOTHING))
    assert "stored" not in caught.value.what


def test_views_of_one_tensor_are_copied_where_the_stack_refuses_them(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path
) -> None:
    report = load(adapter, plain_folder, port(tmp_path, (LINE, VIEWS)))
    assert "layers.0.self_attn.qkv_proj.q_proj.weight" in report.loaded and not report.missing
    told = [note for note in report.notes if "views of one tensor" in note]
    assert len(told) == (1 if adapter.check_environment().tier is Tier.REAL_CPU else 0)
