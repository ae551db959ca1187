"""A port's config is made as ports make it themselves, and old and new rope fields mean the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT, PROMPTS, reference, relative

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter
from equiport.stacks.teacher_forcing import decode_logits

BY_HAND = """
    @classmethod
    def from_pretrained(cls, model_path, neuron_config=None, **kwargs):
        import json
        with open(os.path.join(model_path, "config.json")) as opened:
            params = json.load(opened)
        names = cls.get_required_attributes(cls) + ["head_dim", "pad_token_id", "tie_word_embeddings"]
        fields = {name: params.get(name, 10000.0 if name == "rope_theta" else None) for name in names}
        BODY
"""


def port_with(tmp_path: Path, stem: str, body: str) -> Path:
    start, _, rest = PORT.read_text().partition("    @classmethod\n    def from_pretrained(")
    _, _, after = rest.partition("\n\n\nclass Llama3RotaryEmbedding")
    path = tmp_path / f"modeling_{stem}.py"
    path.write_text(f"{start}{BY_HAND.replace('BODY', body)}\n\nclass Llama3RotaryEmbedding{after}")
    return path


@pytest.fixture
def folder(plain_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "hf"
    shutil.copytree(plain_folder, copy)
    return copy


def rewrite(folder: Path, **fields: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        content.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**content, **fields}))


def create(adapter: StackAdapter, folder: Path, port: Path = PORT) -> Any:
    return adapter.create_model(port, CAUSAL, CONFIG, folder, dtype=torch.float32, batch_size=3, seq_len=32)


def test_the_ports_own_from_pretrained_is_used(adapter: StackAdapter, folder: Path, tmp_path: Path) -> None:
    port = port_with(tmp_path, "own_route", "return cls(neuron_config, mark='own', **fields)")
    made = create(adapter, folder, port)
    assert made.config.mark == "own"
    assert made.config._name_or_path == str(folder)


@pytest.mark.parametrize(
    ("stem", "body"),
    [
        ("fails", "raise OSError('no such thing')"),
        ("ignores", "return cls(LlamaNeuronConfig(tp_degree=1), mark='own', **fields)"),
    ],
)
def test_the_constructor_where_that_fails(
    adapter: StackAdapter, folder: Path, tmp_path: Path, stem: str, body: str
) -> None:
    config = create(adapter, folder, port_with(tmp_path, stem, body)).config
    assert not hasattr(config, "mark")
    assert (config.neuron_config.batch_size, config.neuron_config.seq_len, config.hidden_size) == (3, 32, 64)


@pytest.mark.parametrize("own_route", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 123.0, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 123.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 123.0, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_fields_of_both_transformers(
    adapter: StackAdapter, folder: Path, tmp_path: Path, fields: dict[str, Any], own_route: bool
) -> None:
    rewrite(folder, **fields)
    body = "return cls(neuron_config, rope_scaling=params.get('rope_scaling'), **fields)"
    config = create(adapter, folder, port_with(tmp_path, "by_hand", body) if own_route else PORT).config
    scaled = fields.get("rope_parameters", {}).get("rope_type") == "linear"
    assert config.rope_theta == 123.0
    assert (config.rope_scaling or {}).get("factor") == (2.0 if scaled else None)
    assert json.loads((folder / "config.json").read_text()).get("rope_parameters") == fields.get("rope_parameters")


def test_a_port_that_reads_by_hand_is_right(
    adapter: StackAdapter, make_folder: Any, tokens: list[list[int]], tmp_path: Path
) -> None:
    folder = make_folder(rope_theta=77.0)
    port = port_with(tmp_path, "reads_by_hand", "return cls(neuron_config, **fields)")
    model = create(adapter, folder, port)
    assert adapter.load_weights(model, folder, torch.float32).clean
    assert relative(decode_logits(adapter, model, tokens, PROMPTS), reference(folder, tokens)) < 5e-6


def test_a_model_that_cannot_be_built(adapter: StackAdapter, folder: Path, tmp_path: Path) -> None:
    port = tmp_path / "modeling_unbuildable.py"
    port.write_text(PORT.read_text().replace("self.norm = make_rmsnorm(config)", "self.norm = config.final_norm"))
    model = create(adapter, folder, port)
    message = r"modeling_unbuildable\.py:\d+: the port's model cannot be built: AttributeError.*final_norm"
    with pytest.raises(EquiportError, match=message):
        adapter.load_weights(model, folder, torch.float32)
