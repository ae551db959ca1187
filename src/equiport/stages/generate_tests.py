"""Write the component tests of stage 2 from the mapping: one file a component type, simplest first."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.fixtures.folder import read_config
from equiport.structure.mapping import ComponentMapping

COMPONENT_ORDER = (
    "norm", "embedding", "entry_path", "linear", "rotary", "mlp", "attention_qkv", "attention_o", "attention",
    "lm_head", "head_path", "module", "decoder_layer",
)  # fmt: skip
_CONSTANTS = {
    "HIDDEN_SIZE": "hidden_size",
    "NUM_LAYERS": "num_hidden_layers",
    "NUM_HEADS": "num_attention_heads",
    "NUM_KV_HEADS": "num_key_value_heads",
    "HEAD_DIM": "head_dim",
    "INTERMEDIATE_SIZE": "intermediate_size",
    "VOCAB_SIZE": "vocab_size",
}


# a generated file that was not edited since ends with this and the sha256 of what stands before
_MARK = "# generated from component_mapping.json, made again when that changes unless edited: "


def generate_tests(folder: Path, mapping: ComponentMapping, model: Path, skip: Mapping[str, str]) -> list[Path]:
    """Write conftest.py, tensor_compare.py and the missing test files.

    Files that someone wrote or edited are left alone; those that stand as they were generated follow the mapping.
    `skip`: components that cannot be compared here, with the reason (they become blind spots).

    Returns the files written; one that is right as it stands is not written again.
    """
    templates = Environment(
        loader=FileSystemLoader(content_dir("templates")), undefined=StrictUndefined, keep_trailing_newline=True
    )
    config = read_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if not (folder / "conftest.py").is_file():
        constants: dict[str, Any] = {name: config.get(key) for name, key in _CONSTANTS.items() if config.get(key)}
        text = templates.get_template("conftest_template.py.j2").render(constants=constants)
        written.append(write_text(folder / "conftest.py", text))
    if not (folder / "tensor_compare.py").is_file():
        text = (content_dir("scripts") / "tensor_compare.py").read_text(encoding="utf-8")
        written.append(write_text(folder / "tensor_compare.py", text))
    old = {path: path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("test_*.py")}
    generated = {path for path, text in old.items() if is_generated(text)}
    wanted = set()
    kinds = sorted(
        {entry.component_type or "module" for entry in mapping.tested},
        key=lambda kind: (component_rank(kind), kind),
    )
    for number, kind in enumerate(kinds):
        entries = [e for e in mapping.tested if (e.component_type or "module") == kind and e.name not in skip]
        if not entries or set(folder.glob(f"test_*_{kind}.py")) - generated:
            continue
        text = templates.get_template("component_test.py.j2").render(
            kind=kind,
            name=re.sub(r"\W", "_", kind),
            pairs=[(" + ".join(entry.source) or "the whole model", entry.name) for entry in entries],
            components=[json.dumps(entry.name) for entry in entries],
        )
        path = folder / f"test_{number:02d}_{kind}.py"
        wanted.add(path)
        if old.get(path) != _marked(text):
            written.append(write_text(path, _marked(text)))
    for path in generated - wanted:
        path.unlink()
    return written


def _marked(text: str) -> str:
    """The text with a last line by which it is known as generated and unedited."""
    return f"{text}\n{_MARK}{hashlib.sha256(text.encode()).hexdigest()[:16]}\n"


def is_generated(text: str) -> bool:
    """Whether a test file stands as it was generated."""
    body, mark, digest = text.rpartition("\n" + _MARK)
    return bool(mark) and digest.strip() == hashlib.sha256(body.encode()).hexdigest()[:16]


def component_rank(kind: str) -> int:
    """Place of a component type from the simplest to the most composed."""
    return COMPONENT_ORDER.index(kind) if kind in COMPONENT_ORDER else len(COMPONENT_ORDER)
