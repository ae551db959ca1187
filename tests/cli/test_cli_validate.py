"""`equiport validate`: what is done and unchanged is not run again; what changed is; bad input leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import CAUSAL, CONFIG, INNER, TINY_LLAMA, Cli, World, equiport_command

import equiport

# an interpreter whose server starts nothing: each job's process writes down what it was asked and ends
_INTERPRETER = """#!{python}
import os, sys
sys.path.insert(0, {source!r})
from equiport import warm_server

def run(job):
    with open({log!r}, "a") as log, open({log!r} + ".arguments", "a") as arguments:
        print(os.path.basename(job.argv[0]), file=log)
        print(*job.argv, file=arguments)
    {end}

warm_server._run = run
sys.argv = sys.argv[2:4]  # -m equiport.warm_server FD, and no modules to import
warm_server.main()
"""


def recording_interpreter(world: World, end: str = "sys.exit(0)") -> Path:
    """Let the experiment's interpreter write down what it is asked to run, instead of running it."""
    log = world.root / "ran.txt"
    python = world.root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    source = str(Path(equiport.__file__).parents[1])
    python.write_text(_INTERPRETER.format(python=sys.executable, source=source, log=str(log), end=end))
    python.chmod(0o755)
    world.edit_config(VENV=str(world.root / "venv"))
    return log


def stages_run(world: World, cli: Cli, *flags: object) -> list[int]:
    log = recording_interpreter(world)
    cli("validate", world.exp, *flags)
    names = log.read_text().split() if log.exists() else []
    return [int(name.removeprefix("run_stage").removesuffix(".py")) for name in names]


def touch(world: World, name: str) -> None:
    with (world.root / name).open("a") as stream:
        stream.write("\n")


def test_the_run_itself(done: World) -> None:
    said = (done.root / "validate.out").read_text()
    assert "PASS, stages 0-6; " in said and "on the CPU stand-in" in said and "blind spots" in said
    assert [done.result(stage)["verdict"] for stage in (0, 1, 2, 5, 6)] == ["PASS"] * 5
    assert not any(done.result(stage)["forced"] for stage in (0, 1, 2, 5, 6))
    for name in ("model_tree", "component_mapping.json", "class_divergence_report.json", "tests", "results", "plots",
                 "EQUIVALENCE_REPORT.md", "EQUIVALENCE_REPORT.html", "equiv_config.json"):  # fmt: skip
        assert (done.exp / name).exists(), name
    assert not list(done.exp.rglob(".*"))


def test_a_second_run_runs_nothing(done: World, cli: Cli) -> None:
    before = {path: path.stat().st_mtime_ns for path in (done.exp / "results").glob("stage?.json")}
    recording_interpreter(done)
    ran = cli("validate", done.exp)
    assert ran.code == 0, ran.out + ran.err
    assert [f"Stage {stage} is up to date: PASS" in ran.out for stage in (0, 1, 2, 5, 6)] == [True] * 5
    assert not (done.root / "ran.txt").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "PASS, stages 0-6" in ran.out


def loosen(world: World) -> None:
    (world.root / "limits.json").write_text('{"r32_pooled": 0.5}')
    world.edit_config(thresholds=str(world.root / "limits.json"))


@pytest.mark.parametrize(
    ("change", "flags", "expected"),
    [
        (lambda world: touch(world, "port/modeling_llama_nxdi.py"), (), [0, 1, 2, 5]),
        (lambda world: touch(world, "model/config.json"), (), [0, 1, 2, 5]),
        (lambda world: touch(world, "exp/component_mapping.json"), (), [0, 2]),
        (lambda world: touch(world, "exp/tests/test_00_norm.py"), (), [2]),
        (lambda world: touch(world, "exp/results/teacher_forced.json"), (), [6]),
        (lambda world: (world.exp / "results" / "stage1.json").unlink(), (), [1]),
        (lambda world: world.edit_result(5, forced=True), (), [5]),
        (lambda world: world.edit_config(seed=7), (), [0, 1, 2, 5]),
        (loosen, (), [0, 1, 2, 5]),
        (lambda world: world.edit_result(5, settings={**world.result(5)["settings"], "tau_r": 9.0}), (), [5]),
        (lambda world: None, ("--from", 5), [5, 6]),
        (lambda world: None, ("--force",), [0, 1, 2, 5, 6]),
        (lambda world: None, ("--force", "--through", 1), [0, 1]),
    ],
)
def test_what_is_run_again(
    done: World, cli: Cli, change: Callable[[World], None], flags: tuple[object, ...], expected: list[int]
) -> None:
    change(done)
    # the recording interpreter mends nothing: stage 6 waits for a fresh stage 5
    assert stages_run(done, cli, *flags) == expected


def test_a_changed_thresholds_file_is_run_again(done: World, cli: Cli) -> None:
    from equiport.experiment.hashing import hash_inputs

    limits = done.root / "limits.json"
    limits.write_text('{"r_single": 1.15, "match_rate": 0.5}')
    done.edit_config(thresholds=str(limits))
    for stage in (0, 1, 2, 5, 6):
        result = done.result(stage)
        settings = {**result["settings"]}
        settings.update({"tau_r": 1.15} if stage == 2 else {"pass_threshold": 0.5} if stage == 1 else {})
        done.edit_result(stage, inputs={**result["inputs"], **hash_inputs([limits], done.exp)}, settings=settings)
    ran = cli("validate", done.exp)
    assert ran.out.count("is up to date") == 5 and "thresholds of limits.json" in ran.out
    limits.write_text('{"r_single": 99, "match_rate": 0.4}')
    assert stages_run(done, cli) == [0, 1, 2, 5]
    arguments = (done.root / "ran.txt.arguments").read_text()
    assert f"--thresholds {limits}" in arguments
    assert "--tau-r 99.0" in arguments and "--pass-threshold 0.4" in arguments


def test_a_failed_stage_2_takes_the_later_results_away(done: World, cli: Cli) -> None:
    done.edit_result(2, verdict="FAIL", reasons=[{"code": "COMPONENT_FAILS", "message": "m", "subject": "layers.{i}"}])
    done.edit_result(5, tool_version="0")
    ran = cli("validate", done.exp)
    assert ran.code == 1
    assert "Stage 5 needs stage 2 PASS: not run" in ran.out
    assert not (done.exp / "results" / "stage5.json").exists()
    assert "FAIL at stage 2: layers.{i}: COMPONENT_FAILS" in ran.out


def test_a_config_without_the_causal_class(done: World, cli: Cli) -> None:
    done.edit_config(TARGET_CAUSAL_CLASS=None)
    stages_run(done, cli, "--force")
    arguments = (done.root / "ran.txt.arguments").read_text()
    assert f"{done.port}:{CAUSAL}" in arguments and f"--target-causal-class {CAUSAL}" in arguments
    assert "None" not in arguments


@pytest.mark.parametrize(
    ("exit_with", "code", "words"),
    [
        ("sys.exit(2)", 2, []),
        ("sys.exit(4)", 4, []),
        ("os.kill(os.getpid(), 9)", 2, ["stage 0 was killed by signal 9", "memory"]),
    ],
)
def test_a_stage_that_does_not_end_well(done: World, cli: Cli, exit_with: str, code: int, words: list[str]) -> None:
    recording_interpreter(done, exit_with)
    ran = cli("validate", done.exp, "--force")
    assert ran.code == code
    assert "PASS" not in ran.out
    if words:
        assert ran.is_clear_error(code, *words)


def test_an_interpreter_that_is_not_there(done: World, cli: Cli) -> None:
    done.edit_config(VENV="/no/venv")
    assert cli("validate", done.exp, "--force").is_clear_error(2, "/no/venv/bin/python", "VENV", "equiv_config.json")


def test_a_new_out_folder_is_resumed(done: World, cli: Cli) -> None:
    ran = cli("validate", *done.validate_flags)
    assert ran.code == 0 and ran.out.count("is up to date") == 5


def two_causal_classes(world: World) -> None:
    world.port.write_text(world.port.read_text() + f"\n\nclass SecondForCausalLM({CAUSAL}):\n    pass\n")


@pytest.mark.parametrize(
    ("prepare", "flags", "code", "words"),
    [
        (None, [], 2, ["--port, --out missing", "--model HF_DIR"]),
        (None, ["{exp}", "--port", "{port}"], 2, ["exclude one another", "--port"]),
        (None, ["{exp}", "--seed", "3"], 2, ["exclude one another", "--seed"]),
        (None, ["{exp}", "--thresholds", "t.json"], 2, ["exclude one another", "--thresholds"]),
        (None, ["{exp}"], 2, ["{exp}", "no such experiment directory"]),
        (None, ["{all}", "--through", "7"], 2, ["--through", "bench_config.yaml", "tokenizer"]),
        (None, ["{all}", "--through", "11"], 2, ["--through", "no stage 11"]),
        (None, ["{all}", "--stack", "unheard_of"], 2, ["unknown stack 'unheard_of'", "nxdi"]),
        (None, ["{all}", "--causal-class", "Nothing"], 2, ["modeling_llama_nxdi.py", "has no class 'Nothing'"]),
        (None, ["{all}", "--config-class", "Nothing"], 2, ["has no class 'Nothing'"]),
        (None, ["{all}", "--thresholds", "/no/file.json"], 2, ["/no/file.json", "thresholds"]),
        (two_causal_classes, ["{all}"], 3, ["several classes", CAUSAL, "SecondForCausalLM", "--causal-class"]),
        (lambda w: w.port.unlink(), ["{all}"], 2, ["modeling_llama_nxdi.py", "no such file"]),
        (lambda w: w.port.write_text("def f(:\n"), ["{all}"], 2, ["modeling_llama_nxdi.py", "is not Python"]),
        (lambda w: w.port.write_text("import torch\n"), ["{all}"], 2, ["modeling_llama_nxdi.py", "--target-stack"]),
        (lambda w: (w.model / "config.json").unlink(), ["{all}"], 2, ["config.json", "no such file"]),
        (lambda w: (w.model / "config.json").write_text("{"), ["{all}"], 2, ["config.json", "is no JSON"]),
        (lambda w: (w.model / "config.json").write_text("[]"), ["{all}"], 2, ["config.json", "JSON object"]),
        (lambda w: (w.model / "model.safetensors").write_bytes(b"\x10" * 40), ["{all}"], 2,
         ["model.safetensors", "truncated", "Download"]),
        (lambda w: (w.model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
         ["{all}"], 2, ["gone.safetensors", "missing"]),
        (lambda w: (w.model / "model.safetensors.index.json").write_text("{"), ["{all}"], 2, ["index.json"]),
        (lambda w: w.exp.write_text("a file"), ["{all}"], 2, ["--out", "cannot be made", "/exp"]),
    ],
)  # fmt: skip
def test_bad_input(
    fresh: World, cli: Cli, prepare: Callable[[World], object] | None, flags: list[str], code: int, words: list[str]
) -> None:
    if prepare:
        prepare(fresh)
    before = sorted(fresh.root.rglob("*"))
    named = {"{exp}": [fresh.exp], "{port}": [fresh.port], "{all}": fresh.validate_flags}
    arguments = [value for flag in flags for value in named.get(flag, [flag])]
    ran = cli("validate", *arguments)
    assert ran.is_clear_error(code, *(word.replace("{exp}", str(fresh.exp)) for word in words))
    assert sorted(fresh.root.rglob("*")) == before  # nothing was begun


def test_a_truncated_weight_file_of_real_length(fresh: World, cli: Cli) -> None:
    file = fresh.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert cli("validate", *fresh.validate_flags).is_clear_error(2, "model.safetensors", "truncated")
    assert not fresh.exp.exists()


def test_interrupted_and_gone_on(fresh: World, cli: Cli) -> None:
    """Ctrl-C in stage 0: one line, exit 130, nothing half-written; the same command then goes on."""
    (fresh.model / "config.json").write_text(json.dumps(TINY_LLAMA))
    (fresh.model / "model.safetensors").unlink()  # synthetic weights: a folder that is written before the result
    process = subprocess.Popen(
        equiport_command("validate", *fresh.validate_flags, "--through", 0),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if "Stage 0" in line:
            break
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    assert not (fresh.exp / "results" / "stage0.json").exists()
    assert process.returncode == 130, (out, err)
    assert "interrupted" in err
    again = cli("stage0", *fresh.stage0_flags)
    assert again.code == 0, again.out + again.err
    report = cli("report", fresh.exp)
    assert report.code == 0 and "PASS, stages 0-0" in report.out and "synthetic weights" in report.out
    assert not [path for path in fresh.exp.rglob(".*")]


def test_help_is_quick() -> None:
    """Processor time, not wall time: what else runs on the machine is not ours."""
    import resource

    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(equiport_command("--help"), capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0 and all(verb in done.stdout for verb in ("validate", "report", "doctor"))
    assert min(spent) < 0.5


def test_version_and_unknown_verbs() -> None:
    done = subprocess.run(equiport_command("--version"), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("equiport ")
    done = subprocess.run(equiport_command("valdiate"), capture_output=True, text=True)
    assert done.returncode == 2 and "valdiate" in done.stderr and "Traceback" not in done.stderr


def test_doctor(cli: Cli) -> None:
    ran = cli("doctor")
    assert ran.code == 0
    assert "nxdi: stand-in" in ran.out and "torch " in ran.out and f"Python {sys.version.split()[0]}" in ran.out
    assert INNER not in ran.out and CONFIG not in ran.out
