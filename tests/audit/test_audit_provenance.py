"""The installed source must be the original: an edited copy of the package is told from it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from equiport.audit import audit_path, provenance
from equiport.audit.provenance import check_provenance

FILE = "transformers/models/llama/modeling_llama.py"


def test_the_installed_families_are_the_originals() -> None:
    found = check_provenance(["llama", "gemma2"])
    assert len(found) >= 8 and FILE in {item.file for item in found}
    assert not [item for item in found if item.fault], found


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder of its own with a record of its one modeling file; returns the file."""
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("")
    file.write_text("class LlamaMLP:\n    pass\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    info = tmp_path / "transformers-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9\n")
    (info / "RECORD").write_text(f"{FILE},sha256={digest},{file.stat().st_size}\n")
    monkeypatch.setattr(provenance, "package_root", lambda: tmp_path / "transformers")
    monkeypatch.syspath_prepend(str(tmp_path))
    return file


def test_an_edited_source_is_found(package: Path, tmp_path: Path) -> None:
    assert [item.fault for item in check_provenance(["llama"])] == [""]
    package.write_text("class LlamaMLP:\n    fast = True\n")
    assert [item.fault for item in check_provenance(["llama"])] == ["differs from what was installed"]
    port = tmp_path / "port"
    port.mkdir()
    (port / "nxdi_block.py").write_text("from transformers.models.llama.modeling_llama import LlamaRMSNorm\n")
    found = audit_path(port)
    assert [(item.rule, item.file) for item in found.counting] == [("reference-modified", FILE)]


def test_a_file_without_record_is_a_note(package: Path, tmp_path: Path) -> None:
    (package.parents[2] / "activations.py").write_text("x = 1\n")
    found = [item for item in check_provenance(["llama"]) if item.fault]
    assert [(item.file, item.known) for item in found] == [("transformers/activations.py", False)]


def test_a_process_that_does_not_end_is_a_fault_of_every_file(package: Path) -> None:
    assert all("TimeoutExpired" in item.fault and item.known for item in check_provenance(["llama"], timeout=0.001))
