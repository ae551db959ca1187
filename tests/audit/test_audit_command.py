"""`equiport audit` as a user calls it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, Cli

from equiport.audit import RULES, audit_path, load_report
from equiport.bench.audit.held_out import CHEATS, PORT

CHEAT = CHEATS["golden file"][0]


@pytest.fixture
def cheat(tmp_path: Path) -> Path:
    """A unit whose test compares with a stored file."""
    folder = tmp_path / "unit"
    folder.mkdir()
    for name, text in CHEAT.items():
        (folder / name).write_text(text)
    return folder


def test_a_cheating_folder_exits_1_and_says_where_and_why(cheat: Path, cli: Cli) -> None:
    ran = cli("audit", cheat)
    assert ran.code == 1
    line = next(n for n, text in enumerate(CHEAT["test_block.py"].splitlines(), 1) if "gold.npy" in text)
    assert "error" in ran.out and f"test_block.py:{line}" in ran.out and "np.load('gold.npy')" in ran.out
    assert "why:" in ran.out and "do:" in ran.out
    page = (cheat / "AUDIT.md").read_text()
    assert f"`outside-world` test_block.py:{line}" in page and "Rules over source text" in page
    stored = load_report(cheat / "audit.json")
    assert (
        stored.schema_version == 1
        and stored.tool_version
        and stored.rules == [*(rule.id for rule in RULES), "reference-modified"]
    )
    for name, text in CHEAT.items():
        assert stored.files[name] == hashlib.sha256(text.encode()).hexdigest()
    assert not stored.clean and all(item.quoted and item.why and item.remedy for item in stored.counting)


def test_the_example_is_clean_and_its_note_does_not_count(tmp_path: Path, cli: Cli) -> None:
    ran = cli("audit", EXAMPLE_PORT, "--out", tmp_path)
    assert ran.code == 0 and "audit: clean" in ran.out and "borrowed-leaf" in ran.out
    assert {path.name for path in tmp_path.iterdir()} == {"audit.json", "AUDIT.md"}


def test_the_test_of_the_guide_is_clean(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE_PORT, tmp_path)
    (tmp_path / "test_00_mlp.py").write_text(
        "import torch\nfrom torch import nn\nfrom conftest import TOLERANCE_RATIO\n"
        "from tensor_compare import check_3tensor_result, compare_3tensors\n"
        "from modeling_llama_nxdi import NeuronLlamaMLP\n"
        "from transformers.models.llama.modeling_llama import LlamaMLP\n\n\n"
        "def test_mlp():\n    torch.manual_seed(42)\n    weight_fp32 = torch.randn(16, 8)\n"
        "    ref_fp32 = LlamaMLP(config)\n    ref_fp32.up_proj.weight.data.copy_(weight_fp32)\n"
        "    ref_bf16 = LlamaMLP(config)\n    ref_bf16.up_proj.weight = nn.Parameter(weight_fp32.to(torch.bfloat16))\n"
        "    target_bf16 = NeuronLlamaMLP(neuron_config)\n"
        "    target_bf16.up_proj.weight = nn.Parameter(weight_fp32.to(torch.bfloat16))\n    target_bf16.eval()\n"
        "    x = torch.randn(2, 3, 8)\n    with torch.no_grad():\n        out1 = ref_fp32(x.float()).float()\n"
        "        out2 = ref_bf16(x.to(torch.bfloat16)).float()\n        out3_raw = target_bf16(x.to(torch.bfloat16))\n"
        "        out3 = out3_raw[0].float() if isinstance(out3_raw, tuple) else out3_raw.float()\n"
        "    result = compare_3tensors(out1, out2, out3)\n"
        '    assert check_3tensor_result(result, "mlp", TOLERANCE_RATIO)\n'
    )
    (tmp_path / "conftest.py").write_text("TOLERANCE_RATIO = 1.2\n")
    found = audit_path(tmp_path)
    assert found.clean, found.counting


def test_bad_input_is_never_clean(tmp_path: Path, cli: Cli) -> None:
    assert cli("audit", tmp_path / "nowhere").is_clear_error(2, "nowhere", "no such file")
    assert cli("audit", tmp_path).is_clear_error(2, "no Python file")
    (tmp_path / "a.txt").write_text("x")
    assert cli("audit", tmp_path / "a.txt").is_clear_error(2, "no Python file")
    assert cli("audit").is_clear_error(2, "PATH is missing")
    assert cli("audit", "--explain", "wizardry").is_clear_error(2, "wizardry", "reference-in-workspace")


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_every_rule_explains_itself(rule: str, cli: Cli) -> None:
    ran = cli("audit", "--explain", rule)
    assert ran.code == 0 and "finds (" in ran.out and "leaves alone (" in ran.out


def test_a_suppression_needs_a_reason_and_is_printed(cheat: Path, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "suppressions.json"
    entry = {
        "rule": "outside-world",
        "file": "test_block.py",
        "reason": "the file is made by the nightly reference run",
    }
    file.write_text(json.dumps({"suppressions": [entry, {**entry, "rule": "opaque"}]}))
    ran = cli("audit", cheat, "--suppressions", file)
    assert ran.code == 0 and "1 suppressed" in ran.out, ran.out
    page = (cheat / "AUDIT.md").read_text()
    assert "nightly reference run" in page and "match nothing" in page
    file.write_text(json.dumps({"suppressions": [{**entry, "reason": ""}]}))
    assert cli("audit", cheat, "--suppressions", file).is_clear_error(2, "suppressions.json", "reason")
    file.write_text(json.dumps({"suppressions": [{**entry, "quoted": "another line"}]}))
    assert cli("audit", cheat, "--suppressions", file).code == 1
    file.write_text("[]")
    assert cli("audit", cheat, "--suppressions", file).is_clear_error(2, "no suppressions file")


def test_a_damaged_audit_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "nxdi_block.py").write_text(PORT)
    path = audit_path(tmp_path).save(tmp_path / "audit.json")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "files": 3}))
    with pytest.raises(Exception, match="is no audit: .*Run the audit again"):
        load_report(path)
