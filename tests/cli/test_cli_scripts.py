"""The stage scripts: what a user gets wrong is one line, the documented exit code, and nothing half-written."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from worlds import CAUSAL, CONFIG, EXAMPLE_PORT, INNER, Cli, World

SCRIPTS = EXAMPLE_PORT.parents[2] / "scripts"
RUNNING = ("stage1", "stage5", "teacher_forced")


def snapshot(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond 2 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "name", ["run_stage0", "run_stage1", "run_stage2", "run_stage5", "run_stage6", "run_stage7",
             "run_teacher_forced_comparison",
             "detect_class_divergence"],
)  # fmt: skip
def test_every_script_helps_itself(name: str) -> None:
    done = subprocess.run([sys.executable, SCRIPTS / f"{name}.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "Usage" in done.stdout
    if name != "detect_class_divergence":
        assert all(flag in done.stdout for flag in ("--exp-dir", "--force", "--debug", "--quiet", "--seed"))


# bad model folders, met by every command that loads the source model
MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no folder": (lambda model: model.rename(model.parent / "moved"), ("model", "no such model folder")),
    "no config": (lambda model: (model / "config.json").unlink(), ("config.json", "no such file")),
    "config no json": (lambda model: (model / "config.json").write_text("{,"), ("config.json", "is no JSON")),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), ("model", "no *.safetensors weights")),
    "truncated": (
        lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-64]),
        ("model.safetensors", "truncated", "Download it again"),
    ),
    "no model_type": (lambda model: edit(model, drop="model_type"), ("config.json", "model_type")),
    "unknown model_type": (lambda model: edit(model, model_type="lhama"), ("lhama",)),
}


def edit(model: Path, drop: str = "", **changes: object) -> None:
    config = {**json.loads((model / "config.json").read_text()), **changes}
    config.pop(drop, None)
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("command", RUNNING)
@pytest.mark.parametrize("fault", MODELS)
def test_a_bad_model_folder(fresh: World, cli: Cli, command: str, fault: str) -> None:
    break_it, words = MODELS[fault]
    break_it(fresh.model)
    before = snapshot(fresh.root)
    output = fresh.root / "out.json"
    ran = cli(command, *fresh.port_flags, "--num-tokens", 4, "--output", output)
    assert ran.is_clear_error(2, *words)
    assert snapshot(fresh.root) == before


@pytest.mark.parametrize("fault", [name for name in MODELS if name != "no weights"])
def test_a_bad_model_folder_in_stage_0(fresh: World, cli: Cli, fault: str) -> None:
    break_it, words = MODELS[fault]
    break_it(fresh.model)
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.is_clear_error(2, *words)
    assert not (fresh.exp / "results").exists() and not (fresh.exp / "component_mapping.json").exists()


# bad ports
PORTS: dict[str, tuple[Callable[[str], str], tuple[str, ...]]] = {
    "does not import": (
        lambda text: text.replace("import math", "import no_such_package_x"),
        ("no_such_package_x", "does not import"),
    ),
    "no python": (lambda text: text + "\ndef f(:\n", ("modeling_llama_nxdi.py", "is not Python")),
    "no such class": (lambda text: text.replace(CAUSAL, "Other"), (f"no class '{CAUSAL}'", "Classes that it defines")),
    "wants a field": (
        lambda text: text.replace('"hidden_act",\n', '"hidden_act",\n "window_of_mine",\n'),
        ("config.json", "window_of_mine"),
    ),
}


@pytest.mark.parametrize("fault", PORTS)
@pytest.mark.parametrize("command", ["stage0", *RUNNING])
def test_a_bad_port(fresh: World, cli: Cli, command: str, fault: str) -> None:
    spoil, words = PORTS[fault]
    fresh.port.write_text(spoil(fresh.port.read_text()))
    flags = fresh.stage0_flags if command == "stage0" else [*fresh.port_flags, "--num-tokens", "4"]
    if command == "stage0":
        flags += ["--target-causal-class", CAUSAL]
    ran = cli(command, *flags)
    assert ran.is_clear_error(2, *words)
    assert not list(fresh.root.rglob("stage*.json")) and not list(fresh.root.rglob("component_mapping.json"))


@pytest.mark.parametrize("command", RUNNING)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--model-class": "just_a_name"}, ["--model-class", "FILE:CLASS"]),
        ({"--model-class": f"/no/port.py:{CAUSAL}"}, ["--model-class", "/no/port.py", "no such file"]),
        ({"--config-class": "x.py:"}, ["--config-class", "FILE:CLASS"]),
        ({"--config-class": f"{EXAMPLE_PORT}:{CONFIG}"}, ["--config-class", "another file"]),
        ({"--exp-dir": "/no/exp"}, ["/no/exp", "--exp-dir"]),
        ({"--prompts": "/no/prompts.txt"}, ["/no/prompts.txt", "cannot be read"]),
        ({"--thresholds": "/no/limits.json"}, ["/no/limits.json"]),
        ({"--compiled-model-path": "/no/compiled"}, ["/no/compiled", "--compiled-model-path", "CPU mode"]),
    ],
)
def test_bad_flags(fresh: World, cli: Cli, command: str, changed: dict[str, str], words: list[str]) -> None:
    flags = dict(zip(fresh.port_flags[::2], fresh.port_flags[1::2], strict=True)) | changed
    ran = cli(command, *(part for pair in flags.items() for part in pair), "--num-tokens", 4)
    assert ran.is_clear_error(2, *words)


@pytest.mark.parametrize("command", ["stage5", "teacher_forced"])
def test_ranks_that_are_not_there(fresh: World, cli: Cli, command: str) -> None:
    ran = cli(command, *fresh.port_flags, "--num-tokens", 4, "--tp-size", 2)
    assert ran.is_clear_error(2, "tp_degree", "torchrun")


def test_bad_flags_of_one_script(fresh: World, cli: Cli, tmp_path: Path) -> None:
    ran = cli("stage5", *fresh.port_flags, "--kv-analysis-on-fail")
    assert ran.is_clear_error(2, "--kv-analysis-on-fail", "nxdi")
    (tmp_path / "empty.txt").write_text("\n\n")
    ran = cli("stage1", *fresh.port_flags, "--prompts", tmp_path / "empty.txt")
    assert ran.is_clear_error(2, "empty.txt", "holds no prompt")
    ran = cli("stage0", *fresh.stage0_flags, "--target-stack", "unheard_of")
    assert ran.is_clear_error(2, "unheard_of", "Known stacks", "nxdi")
    flags = fresh.stage0_flags
    flags[flags.index("--target-model-path") + 1] = str(tmp_path)
    assert cli("stage0", *flags).is_clear_error(2, "--target-model-path", "differs")
    for content, words in (("{", ["no valid JSON"]), ('{"tau": 1}', ["tau", "Known keys"]), ("3", ["JSON object"])):
        (tmp_path / "limits.json").write_text(content)
        ran = cli("stage1", *fresh.port_flags, "--thresholds", tmp_path / "limits.json")
        assert ran.is_clear_error(2, "limits.json", *words)


def test_a_missing_flag_is_a_usage_error(cli: Cli) -> None:
    ran = cli("stage1")
    assert ran.code == 2 and "--model-path" in ran.err and "Traceback" not in ran.err


def test_several_causal_classes_are_a_question(fresh: World, cli: Cli) -> None:
    fresh.port.write_text(fresh.port.read_text() + f"\n\nclass SecondForCausalLM({CAUSAL}):\n    pass\n")
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.is_clear_error(3, "several classes", CAUSAL, "SecondForCausalLM")
    assert not fresh.exp.exists()


# prerequisites
@pytest.mark.parametrize(
    ("command", "missing"), [("stage1", 0), ("stage2", 0), ("stage5", 2), ("teacher_forced", 2), ("stage6", 5)]
)
@pytest.mark.parametrize("how", ["missing", "stale"])
def test_a_prerequisite(done: World, cli: Cli, command: str, missing: int, how: str) -> None:
    if how == "missing":
        (done.exp / "results" / f"stage{missing}.json").unlink()
    else:
        done.edit_result(missing, tool_version="0.0")
    mine = int(command[-1]) if command[-1].isdigit() else 5
    kept = (done.exp / "results" / f"stage{mine}.json").read_bytes()
    flags = {
        "stage2": ["--tests-dir", done.exp / "tests"],
        "stage6": ["--teacher-forced", done.exp / "results" / "teacher_forced.json"],
    }.get(command, done.port_flags)
    ran = cli(command, *flags, "--exp-dir", done.exp)
    said = "has not run" if how == "missing" else "is stale"
    assert ran.is_clear_error(4, f"stage {missing} {said}", "--force")
    assert (done.exp / "results" / f"stage{mine}.json").read_bytes() == kept


def test_a_failed_stage_2_holds_stage_5_back(done: World, cli: Cli) -> None:
    done.edit_result(2, verdict="INCONCLUSIVE")
    ran = cli("stage5", *done.port_flags, "--exp-dir", done.exp)
    assert ran.is_clear_error(4, "stage 2 is INCONCLUSIVE, PASS is needed")


def test_force_is_shown(done: World, cli: Cli) -> None:
    (done.exp / "results" / "stage2.json").unlink()
    file = done.exp / "results" / "teacher_forced.json"
    assert cli("stage6", "--teacher-forced", file, "--force").code == 0
    assert done.result(6)["forced"] is True
    assert cli("report", done.exp).code == 4


def test_stage_6_alone(done: World, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "teacher_forced.json"
    file.write_bytes((done.exp / "results" / "teacher_forced.json").read_bytes())
    output = tmp_path / "stage6.json"
    ran = cli("stage6", "--teacher-forced", file, "--output", output)
    assert ran.code == 0 and "standalone" in ran.out
    assert json.loads(output.read_text())["verdict"] == "PASS"
    ran = cli("stage6", "--teacher-forced", file, "--delta", 1e-12, "--output", output)
    assert ran.code == 1 and "KL_P95" in ran.out
    assert json.loads(output.read_text())["settings"]["delta"] == 1e-12
    assert cli("stage6", "--teacher-forced", tmp_path / "no.json").is_clear_error(2, "no.json", "no such file")
    file.write_text("{")
    assert cli("stage6", "--teacher-forced", file).is_clear_error(2, "teacher_forced.json", "is no JSON")
    file.write_text('{"num_tokens": 3}')
    assert cli("stage6", "--teacher-forced", file).is_clear_error(2, "teacher_forced.json", "Run stage 5 again")


def test_the_smoke_test_alone(fresh: World, cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "r" / "stage1.json"
    ran = cli("stage1", *fresh.port_flags, "--num-tokens", 5, "--output", output)
    assert ran.code == 0, ran.out + ran.err
    result = json.loads(output.read_text())
    assert result["metrics"]["match_rate"] > 0.3 and len(result["metrics"]["rows"]) == 10
    assert result["settings"]["num_tokens"] == 5 and result["backend"]["kind"] == "stand-in"
    before = output.read_bytes()
    with full_disk():
        ran = cli("stage1", *fresh.port_flags, "--num-tokens", 5, "--output", output)
    assert ran.is_clear_error(2, "cannot be written", "Free some disk space")
    assert output.read_bytes() == before and list(output.parent.iterdir()) == [output]


def test_teacher_forcing_alone(fresh: World, cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "teacher_forced.json"
    ran = cli("teacher_forced", *fresh.port_flags, "--num-tokens", 5, "--output", output)
    assert ran.code == 0, ran.out + ran.err
    stored = json.loads(output.read_text())
    assert stored["num_tokens"] == 5 and set(stored["paths"]) == {"decode", "prefill"}
    assert "PASS stage 5" in ran.out and "PASS stage 6" in ran.out


def test_stage_0_alone_and_what_it_finds_in_a_mapping(fresh: World, cli: Cli) -> None:
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.code == 0, ran.out + ran.err
    mapping = fresh.exp / "component_mapping.json"
    proposed = json.loads(mapping.read_text())
    assert (fresh.exp / "equiv_config.json").is_file()
    assert json.loads((fresh.exp / "class_divergence_report.json").read_text())[0]["cpu_class"] == "LlamaRMSNorm"
    for content, words in (
        ("{", ["is no JSON"]),
        ("[]", ["non-empty JSON array"]),
        ('[["a", "b", "c", "d"]]', ["entry 0", "pair"]),
        ("[[[], []]]", ["entry 0", "names no module"]),
        ('[[["model.norm"], ["norm"], {"why": 1}]]', ["entry 0", "unknown notes ['why']"]),
    ):
        mapping.write_text(content)
        assert cli("stage0", *fresh.stage0_flags).is_clear_error(2, "component_mapping.json", *words)
        assert mapping.read_text() == content  # a hand-written one is never overwritten
    mapping.write_text(json.dumps([*proposed, [["model.nowhere"], ["norm"]]]))
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.code in (1, 2) and "model.nowhere" in ran.out + ran.err
    mapping.write_text(json.dumps([entry for entry in proposed if entry[1] != ["norm"]]))
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.code == 3 and "UNMAPPED norm" in ran.out


def test_stage_2_with_a_mapping_that_names_no_module(done: World, cli: Cli) -> None:
    mapping = done.exp / "component_mapping.json"
    for content, words in (("{", ["is no JSON"]), ('[["a"]]', ["entry 0"])):
        mapping.write_text(content)
        ran = cli("stage2", "--tests-dir", done.exp / "tests", "--force")
        assert ran.is_clear_error(2, "component_mapping.json", *words)


def test_class_divergence_script(fresh: World, cli: Cli, tmp_path: Path) -> None:
    ran = cli("class_divergence", "--target-module-file", fresh.port, "--output", tmp_path / "d.json")
    assert ran.code == 0 and "1 class divergences" in ran.out
    assert json.loads((tmp_path / "d.json").read_text())[0]["device_class"] == "CustomRMSNorm"
    assert cli("class_divergence", "--target-module-file", tmp_path / "no.py").is_clear_error(2, "no.py")
    (tmp_path / "bad.py").write_text("def f(:\n")
    assert cli("class_divergence", "--target-module-file", tmp_path / "bad.py").is_clear_error(2, "bad.py", "line 1")
    assert INNER not in ran.err


def test_debug_shows_the_traceback(fresh: World, cli: Cli) -> None:
    ran = cli("stage1", *fresh.port_flags, "--exp-dir", "/no/exp", "--debug")
    assert ran.code == 2 and "Traceback" in ran.err


def test_synthetic_weights_survive_a_full_disk(fresh: World, cli: Cli) -> None:
    (fresh.model / "model.safetensors").unlink()
    with full_disk():
        ran = cli("stage0", *fresh.stage0_flags)
    assert ran.is_clear_error(2, "cannot be written", "disk space")
    assert not [path for path in fresh.exp.rglob("*.safetensors")]
    ran = cli("stage0", *fresh.stage0_flags)
    assert ran.code == 0, ran.out + ran.err
