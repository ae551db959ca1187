"""A wrong port, its patch, and the report that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from broken_ports import BROKEN
from worlds import Cli, World

from equiport.compare.verdict import Verdict

PATCH = '''"""The norm's eps is the config's."""


def apply_rmsnorm_patch():
    import modeling_llama_nxdi as port

    if getattr(port.NeuronLlamaModel, "_patched", False):
        return
    norm = port.LlamaRMSNorm
    port.make_rmsnorm = lambda config: norm(config.hidden_size, eps=config.rms_norm_eps)
    port.NeuronLlamaModel._patched = True
'''


@pytest.mark.slow
def test_a_patched_port_passes_and_the_headline_names_the_patch(fresh: World, cli: Cli) -> None:
    eps = next(edit for edit in BROKEN if edit.name == "eps")
    fresh.port.write_text(eps.edit(fresh.port.read_text()))
    source = fresh.port.read_bytes()
    failed = cli("validate", *fresh.validate_flags)
    assert failed.code == 1 and "FAIL at stage 2: layers.{i}.input_layernorm" in failed.out
    (fresh.exp / "patches").mkdir()
    (fresh.exp / "patches" / "rmsnorm_patch.py").write_text(PATCH)
    mended = cli("validate", fresh.exp)
    assert mended.code == 0, mended.out + mended.err
    assert "PASS, stages 0-6" in mended.out and "with patches rmsnorm_patch.py" in mended.out
    assert fresh.port.read_bytes() == source
    rows = fresh.result(4)["metrics"]["rows"]
    assert rows and all(row["after"] == Verdict.PASS.value and row["r32_after"] < 1e-3 for row in rows)
    shutil.rmtree(fresh.exp / "patches")
    again = cli("report", fresh.exp)
    assert again.code != 0, again.out


@pytest.mark.slow
def test_a_drafted_patch_mends_the_port_and_the_experiment_passes_with_it(fresh: World, cli: Cli) -> None:
    off = next(edit for edit in BROKEN if edit.name == "decode position off by one")
    fresh.port.write_text(off.edit(fresh.port.read_text()))
    source = fresh.port.read_bytes()
    failed = cli("validate", *fresh.validate_flags)
    assert failed.code == 1 and "layers.{i}.self_attn" in failed.out, failed.out + failed.err
    assert not list((fresh.exp / "patches").glob("*.py")), "nothing is patched unasked"
    drafted = cli("stage4", "--exp-dir", fresh.exp, "--draft")
    assert drafted.code == 0, drafted.out + drafted.err
    (patch,) = (fresh.exp / "patches").glob("*.py")
    metrics = fresh.result(4)["metrics"]
    assert metrics["drafted"] == metrics["patches"] == [patch.name] and not metrics["undrafted"]
    assert all(row["r32_before"] > 1 > 1e-3 > row["r32_after"] for row in metrics["rows"])
    assert cli("audit", fresh.exp / "patches", "--out", fresh.root / "audit").code == 0
    mended = cli("validate", fresh.exp)
    assert mended.code == 0, mended.out + mended.err
    assert "PASS, stages 0-6" in mended.out and f"with patches {patch.name}" in mended.out
    assert fresh.port.read_bytes() == source


@pytest.mark.slow
def test_a_draft_that_leaves_a_fault_stays_and_fails_by_name(fresh: World, cli: Cli) -> None:
    off = next(edit for edit in BROKEN if edit.name == "decode position off by one")
    source = off.edit(fresh.port.read_text())
    spoilt = source.replace("return self.down_proj(gated)", "return self.down_proj(gated.flip(-1).abs())")
    assert spoilt != source
    fresh.port.write_text(spoilt)
    failed = cli("validate", *fresh.validate_flags, "--through", 4)
    assert failed.code == 1 and "layers.{i}.mlp" in failed.out, failed.out + failed.err
    drafted = cli("stage4", "--exp-dir", fresh.exp, "--draft")
    assert drafted.code == 1, drafted.out + drafted.err
    patches = [path.name for path in (fresh.exp / "patches").glob("*.py")]
    told = [reason for reason in fresh.result(4)["reasons"] if reason["code"] == "DRAFT_INCOMPLETE"]
    assert patches and [reason["subject"] for reason in told] == patches
    assert "mlp" in told[0]["message"] and fresh.port.read_text() == spoilt


def test_stage_4_without_patches_is_refused(done: World, cli: Cli) -> None:
    assert cli("stage4", "--exp-dir", done.exp).is_clear_error(2, "holds no patch", "--patches-dir", "--draft")


def test_a_draft_needs_stage_3(done: World, cli: Cli) -> None:
    assert cli("stage4", "--exp-dir", done.exp, "--draft").is_clear_error(4, "stage 3")


def test_every_stage_refuses_a_patches_folder_that_is_not_there(done: World, cli: Cli, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for stage in ("stage1", "stage5"):
        flags = [*done.port_flags, "--exp-dir", done.exp, "--patches-dir", nowhere]
        assert cli(stage, *flags).is_clear_error(2, "nowhere", "--patches-dir")
