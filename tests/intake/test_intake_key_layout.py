"""The names of stored tensors that a port's conversion reads, found in its text, and given to its source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from port_files import decoder, write

from equiport.fixtures.folder import tensor_headers
from equiport.intake.experiment import write_source
from equiport.intake.inspection import inspect_port
from equiport.intake.source import source_folder
from equiport.reference.key_layout import LAYOUT_FILE
from equiport.reference.model import load_reference

BY_NAME = """
        found = {}
        if "%swte.weight" in state_dict:
            found["embed_tokens.weight"] = state_dict["%swte.weight"]
        for i in range(config.num_hidden_layers):
            theirs, ours = f"%sh.{i}", f"layers.{i}"
            found[f"{ours}.ln_1.weight"] = state_dict[f"{theirs}.ln_1.weight"]
        return found
"""
BY_LOOP = """
        found = {}
        for key, value in state_dict.items():
            if not key.startswith("%s"):
                continue
            found[key.replace("%s", "")] = value
        return found
"""
THROUGH = """
        state_dict["norm.weight"] = state_dict.pop("%snorm.weight")
        return state_dict
"""


def port(folder: Path, name: str, body: str, strips: str | None = None) -> Path:
    text = decoder(name)
    if strips is not None:
        text += f"    _STATE_DICT_MODEL_PREFIX = {strips!r}\n"
    text += f"    @staticmethod\n    def convert_hf_to_neuron_state_dict(state_dict, config):{body}"
    return write(folder, text)


@pytest.mark.parametrize(
    ("name", "body", "strips", "first"),
    [
        ("GPT2", BY_NAME % ("", "", ""), None, "h."),
        ("GPT2", BY_NAME % ("", "", ""), "transformer.", "transformer."),
        ("GPT2", BY_NAME % ("transformer.", "transformer.", "transformer."), None, "transformer."),
        ("GPT2", BY_LOOP % ("transformer.", "transformer."), None, "transformer."),
        ("GPT2", BY_LOOP % ("h.", "h."), None, "h."),
        ("Llama", BY_LOOP % ("language_model.", "language_model."), None, "language_model."),
        ("Llama", THROUGH % "", None, "model."),
        # the stack strips model. from either layout: no layout helps
        ("Llama", THROUGH % "model.", None, "model."),
        ("Llama", THROUGH % "model.", "", "model."),
    ],
)  # fmt: skip
def test_a_source_is_stored_as_the_port_reads_it(
    tmp_path: Path, name: str, body: str, strips: str | None, first: str
) -> None:
    found = inspect_port(port(tmp_path, name, body, strips))
    folder = source_folder(found, tmp_path / "m")
    stored = [header.name for header in tensor_headers(folder)]
    assert any(key.startswith(first) for key in stored)
    other = {"h.": "transformer.", "transformer.": "h.", "model.": "language_model.", "language_model.": "model."}
    assert not any(key.startswith(other[first]) for key in stored)
    with torch.no_grad():
        assert load_reference(folder, torch.float32)(torch.tensor([[3, 5, 7]])).logits.isfinite().all()
    beside = write_source(found, tmp_path / "exp")
    assert (beside / LAYOUT_FILE).is_file() == (first in ("h.", "language_model."))
