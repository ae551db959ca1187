"""Generated component tests follow the mapping as long as nobody has edited them."""

from __future__ import annotations

from pathlib import Path

from equiport.stages.generate_tests import generate_tests
from equiport.structure.mapping import ComponentMapping, MappingEntry

NORM = MappingEntry(("model.norm",), ("norm",), component_type="norm")
MLP = MappingEntry(("model.mlp",), ("mlp",), component_type="mlp")
SECOND = MappingEntry(("model.norm2",), ("norm2",), component_type="norm")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("test_*.py"))


def test_they_follow_the_mapping(tiny_model: Path, tmp_path: Path) -> None:
    written = generate_tests(tmp_path, ComponentMapping((NORM, MLP)), tiny_model, {})
    assert [path.name for path in written] == [
        "conftest.py", "tensor_compare.py", "test_00_norm.py", "test_01_mlp.py",
    ]  # fmt: skip
    assert "HIDDEN_SIZE = 64" in (tmp_path / "conftest.py").read_text()
    assert generate_tests(tmp_path, ComponentMapping((NORM, MLP)), tiny_model, {}) == []
    written = generate_tests(tmp_path, ComponentMapping((SECOND,)), tiny_model, {})
    assert [path.name for path in written] == ["test_00_norm.py"] and names(tmp_path) == ["test_00_norm.py"]
    text = (tmp_path / "test_00_norm.py").read_text()
    assert '"norm2"' in text and '"norm"' not in text
    compile(text, "test_00_norm.py", "exec")


def test_an_edited_file_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    generate_tests(tmp_path, ComponentMapping((NORM, MLP)), tiny_model, {})
    mine = tmp_path / "test_00_norm.py"
    mine.write_text(mine.read_text().replace("COMPONENTS = [", "COMPONENTS = [  # mine"))
    (tmp_path / "conftest.py").write_text("# mine\n")
    assert generate_tests(tmp_path, ComponentMapping((SECOND, MLP)), tiny_model, {}) == []
    assert "# mine" in mine.read_text() and (tmp_path / "conftest.py").read_text() == "# mine\n"


def test_what_cannot_be_compared_gets_no_test(tiny_model: Path, tmp_path: Path) -> None:
    generate_tests(tmp_path, ComponentMapping((NORM, MLP)), tiny_model, {"mlp": "takes no tensor"})
    assert names(tmp_path) == ["test_00_norm.py"]
