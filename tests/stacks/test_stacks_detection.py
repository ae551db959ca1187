"""The stack is read from the port's imports; what cannot be told is an error, never a default."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.stacks.detection import detect_stack

NXDI = "from neuronx_distributed_inference.models.model_base import NeuronBaseModel\n"


def write(folder: Path, text: str, name: str = "modeling_x.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("source", "stack"),
    [
        (NXDI, "nxdi"),
        ("import neuronx_distributed_inference.models.config as c\n", "nxdi"),
        ("from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear\n", "nxdi"),
        ("def late():\n    from neuronx_distributed_inference import models\n", "nxdi"),
        ("from vllm_neuron.models import x\n", "vllm_neuron"),
        (NXDI + "from vllm_neuron.models import x\n", "vllm_neuron"),
    ],
)
def test_from_imports(tmp_path: Path, source: str, stack: str) -> None:
    assert detect_stack(write(tmp_path, source)) == stack


def test_example() -> None:
    assert detect_stack(content_dir("examples") / "llama" / "modeling_llama_nxdi.py") == "nxdi"


@pytest.mark.parametrize("statement", ["from base_x import M", "from .base_x import M", "from . import base_x"])
def test_through_a_sibling_file(tmp_path: Path, statement: str) -> None:
    write(tmp_path, NXDI, "base_x.py")
    assert detect_stack(write(tmp_path, statement + "\n")) == "nxdi"


def test_siblings_that_import_each_other_end(tmp_path: Path) -> None:
    write(tmp_path, "import modeling_x\n", "base_x.py")
    with pytest.raises(EquiportError, match="no known serving stack"):
        detect_stack(write(tmp_path, "import base_x\n"))


def test_unknown_stack_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "import torch\n# neuronx_distributed_inference\n")
    with pytest.raises(EquiportError, match="imports no known serving stack.*--target-stack"):
        detect_stack(path)


def test_explicit_wins(tmp_path: Path) -> None:
    assert detect_stack(write(tmp_path, "import vllm_neuron\n"), "nxdi") == "nxdi"
    with pytest.raises(EquiportError, match="unknown stack 'nxd'"):
        detect_stack(write(tmp_path, NXDI), "nxd")


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="no such file"):
        detect_stack(tmp_path / "absent.py")
    with pytest.raises(EquiportError, match="is a folder"):
        detect_stack(tmp_path)
    with pytest.raises(EquiportError, match=r"is not Python: .*\(line 2\)"):
        detect_stack(write(tmp_path, NXDI + "def broken(:\n"))
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(EquiportError, match="latin.py"):
        detect_stack(tmp_path / "latin.py")
