"""Stage 7 on real tiny models with the real lm_eval: right ports pass, broken ones fail, little evidence is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from downstream_world import Downstream, write_tasks, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from worlds import Cli, World

from equiport import __version__
from equiport.compare.verdict import Verdict
from equiport.experiment import StageResult
from equiport.experiment.hashing import hash_inputs, model_files, port_files
from equiport.stages.downstream_engines import length_classes

pytest.importorskip("lm_eval")
ITEMS = 240


@pytest.fixture(scope="module")
def template(fresh_template: World, tmp_path_factory: pytest.TempPathFactory) -> Downstream:
    root = tmp_path_factory.mktemp("downstream") / "w"
    shutil.copytree(fresh_template.root, root)
    made = Downstream(World(root))
    write_tokenizer(made.world.model)
    write_tasks(made.tasks, made.world.model, ITEMS)
    return made


@pytest.fixture
def down(template: Downstream, tmp_path: Path) -> Downstream:
    shutil.copytree(template.world.root, tmp_path / "w")
    return Downstream(World(tmp_path / "w"))


def replace_in_port(down: Downstream, old: str, new: str) -> None:
    source = down.world.port.read_text()
    assert old in source
    down.world.port.write_text(source.replace(old, new))


def shift_head(down: Downstream) -> None:
    """Every token's logit is its neighbour's."""
    clone = 'state_dict["embed_tokens.weight"].clone()'
    replace_in_port(down, clone, 'state_dict["embed_tokens.weight"].roll(1, dims=0)')


def codes(result: dict[str, Any]) -> set[str]:
    return {reason["code"] for reason in result["reasons"]}


def test_a_right_port_passes_on_choices_of_one_and_two_tokens_and_on_generation(down: Downstream, cli: Cli) -> None:
    ran = cli("stage7", *down.flags(down.config(tasks=["pick", "pairs", "say"])))
    result = down.result()
    rows = {row["task"]: row for row in result["metrics"]["rows"]}
    assert rows["pick"]["verdict"] == rows["pairs"]["verdict"] == "PASS", ran.out
    assert rows["pick"]["port"] > 0.9 and rows["pick"]["chance"] == pytest.approx(1 / 3)
    assert rows["pairs"]["port"] > 0.9 and rows["say"]["port"] > 0.8
    assert rows["pick"]["low"] < rows["pick"]["difference"] < rows["pick"]["high"]
    # 24 generated answers settle nothing
    assert ran.code == 3 and rows["say"]["verdict"] == "INCONCLUSIVE" and "about" in ran.out
    assert codes(result) == {"TOO_FEW_ITEMS"} and rows["say"]["items_to_settle"] > 24
    assert result["backend"]["kind"] == "stand-in" and any(name.endswith("pick.jsonl") for name in result["inputs"])
    samples = json.loads((down.output / "port" / "accuracy" / "samples_pick.json").read_text())
    assert len(samples) == ITEMS and (down.output / "baseline" / "accuracy" / "results.json").is_file()


def test_a_head_whose_rows_are_shifted_fails_and_is_diagnosed(down: Downstream, cli: Cli) -> None:
    shift_head(down)
    ran = cli("stage7", *down.flags(down.config()), "--diagnose-failures")
    assert ran.code == 1 and "DOWNSTREAM_REGRESSION" in ran.out and "back to stage 2" in ran.out
    (row,) = down.result()["metrics"]["rows"]
    assert row["high"] < -0.02 and row["worse"] > 100
    differences = json.loads((down.output / "differences.json").read_text())
    assert len(differences) == row["worse"] + row["better"]
    assert all(item["source_margin"] >= 0 and item["port_margin"] >= 0 for item in differences)


def test_few_items_and_guessing_prove_nothing(down: Downstream, cli: Cli) -> None:
    assert cli("stage7", *down.flags(down.config(limit=8))).code == 3
    (row,) = down.result()["metrics"]["rows"]
    assert row["items"] == 8 and row["items_to_settle"] > 100
    assert cli("stage7", *down.flags(down.config()), "--limit", 9).code == 3
    assert down.result()["metrics"]["rows"][0]["items"] == 9 and down.result()["settings"]["limit"] == 9


def test_a_port_that_guesses_as_well_as_the_source_does_proves_nothing(down: Downstream, cli: Cli) -> None:
    shift_head(down)
    assert cli("stage7", *down.flags(down.config(tasks=["guess"]))).code == 3
    assert "BASELINE_AT_CHANCE" in codes(down.result())


@pytest.mark.parametrize(
    ("published", "code", "reasons"),
    [
        ({}, 3, {"NO_BASELINE"}),
        ({"pick": {"gpu_mean": 0.95, "stderr": 0.02}}, 0, set()),
        ({"pick": {"gpu_mean": 0.95, "stderr": 0.002, "k": 20}}, 3, {"TOO_FEW_ITEMS"}),
    ],
)
def test_without_a_baseline_only_a_published_score_decides(
    down: Downstream, cli: Cli, published: dict[str, Any], code: int, reasons: set[str]
) -> None:
    ran = cli("stage7", *down.flags(down.config(published=published, write={"run_hf_baseline": False})))
    assert (ran.code, codes(down.result())) == (code, reasons), ran.out
    assert not (down.output / "baseline").exists()


def test_a_published_score_that_the_port_misses_fails(down: Downstream, cli: Cli) -> None:
    shift_head(down)
    published = {"pick": {"gpu_mean": 0.95, "stderr": 0.02}}
    assert cli("stage7", *down.flags(down.config(published=published, write={"run_hf_baseline": False}))).code == 1


def test_logits_that_are_nan_fail(down: Downstream, cli: Cli) -> None:
    clone = 'state_dict["embed_tokens.weight"].clone()'
    replace_in_port(down, clone, f'{clone} * float("nan")')
    ran = cli("stage7", *down.flags(down.config(limit=40)))
    assert ran.code == 1 and "NON_FINITE_METRIC" in codes(down.result())


BAD: list[tuple[Callable[[Downstream], Path], tuple[str, ...]]] = [
    (lambda down: down.config(limit=0), ("bench_config.yaml", "limit", "greater than or equal to 1")),
    (lambda down: down.config(limit="many"), ("bench_config.yaml", "benchmarks.lm_eval.accuracy.limit")),
    (lambda down: down.config(tasks=[]), ("bench_config.yaml", "benchmarks.lm_eval.accuracy.tasks")),
    (lambda down: down.config(taks=["pick"]), ("bench_config.yaml", "accuracy.taks", "Extra inputs")),
    (lambda down: down.config(tasks=["pick", "pick"]), ("bench_config.yaml", "named twice")),
    (lambda down: down.config(tasks=["no_such"]), ("lm_eval knows no task 'no_such'",)),
    (lambda down: down.config(tasks=["nothing"]), ("nothing",)),
    (lambda down: down.config(tasks=["rolling"]), ("perplexity", "multiple-choice")),
    (lambda down: down.config(include_path="nowhere"), ("bench_config.yaml", "include_path", "no such folder")),
    (lambda down: down.config(use_chat=True), ("use_chat", "no chat template")),
    (lambda down: down.config(published={"other": {"gpu_mean": 1, "stderr": 0.1}}), ("published", "other")),
    (lambda down: down.config(model={"model_path": "nowhere"}), ("nowhere", "no such model folder")),
    (lambda down: down.config(model={"compiled_model_path": "nowhere"}), ("nowhere", "does not exist")),
    (lambda down: down.config(model={"compiled_model_path": "model"}), ("model.compiled_model_path", "CPU mode")),
    (lambda down: down.config(write={"run_hf_baseline": "perhaps"}), ("run_hf_baseline",)),
    (lambda down: no_yaml(down), ("bench_config.yaml", "is no YAML")),
    (lambda down: down.world.root / "absent.yaml", ("absent.yaml", "no such file")),
]


def no_yaml(down: Downstream) -> Path:
    file = down.config()
    file.write_text("model: [")
    return file


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_input_is_one_clear_line(
    down: Downstream, cli: Cli, make: Callable[[Downstream], Path], words: tuple[str, ...]
) -> None:
    assert cli("stage7", *down.flags(make(down))).is_clear_error(2, *words)
    assert not (down.output / "stage7.json").exists()


def test_no_tokenizer_and_no_lm_eval_are_clear(down: Downstream, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (down.world.model / "tokenizer.json").unlink()
    assert cli("stage7", *down.flags(down.config())).is_clear_error(2, "holds no tokenizer", "tokenizer.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli("stage7", *down.flags(down.config())).is_clear_error(2, "lm_eval is not installed", "equiport[eval]")


def test_chat_templates_are_applied(down: Downstream, cli: Cli) -> None:
    write_tokenizer(down.world.model, chat=True)
    ran = cli("stage7", *down.flags(down.config(use_chat=True, limit=4)))
    assert ran.code == 3, ran.err
    samples = json.loads((down.output / "port" / "accuracy" / "samples_pick.json").read_text())
    assert all(sample["arguments"][0][0].endswith(" w1 ") for sample in samples)


def test_stage_7_needs_stages_5_and_6_and_the_experiments_own_port(down: Downstream, cli: Cli) -> None:
    world = down.world
    cli("stage0", *world.stage0_flags, "--quiet")
    flags = ["--bench-config", down.config(limit=4), "--output-dir", world.exp / "results" / "stage7"]
    assert cli("stage7", *flags).is_clear_error(4, "stage 5 has not run", "stage 6 has not run", "--force")
    forced = cli("stage7", *flags, "--force")
    assert forced.code == 3 and world.result(7)["forced"] is True
    for stage in (5, 6):
        inputs = hash_inputs([*model_files(world.model), *port_files(world.port)], world.exp)
        passed = StageResult(stage=stage, verdict=Verdict.PASS, inputs=inputs, tool_version=__version__)
        passed.save(world.experiment.result_path(stage))
    assert cli("stage7", *flags).code == 3 and world.result(7)["forced"] is False
    assert world.experiment.freshness(7).fresh
    with (down.tasks / "pick.jsonl").open("a") as file:
        file.write("\n")
    assert not world.experiment.freshness(7).fresh
    shutil.copytree(world.model, world.root / "other")
    other = down.config(model={"model_path": str(world.root / "other")})
    assert cli("stage7", "--bench-config", other, *flags[2:]).is_clear_error(2, "model.model_path", "experiment's")
    report = cli("report", world.exp)
    assert "pick acc" in (world.exp / "EQUIVALENCE_REPORT.md").read_text(), report.err


def test_data_that_would_have_to_be_downloaded_is_one_clear_line(down: Downstream, cli: Cli) -> None:
    (down.tasks / "remote.yaml").write_text((down.tasks / "pick.yaml").read_text().replace("pick", "remote"))
    task = yaml.safe_load((down.tasks / "remote.yaml").read_text())
    (down.tasks / "remote.yaml").write_text(yaml.safe_dump({**task, "dataset_path": "no-one/nothing"}))
    config = down.config(tasks=["remote"])
    assert cli("stage7", *down.flags(config)).is_clear_error(2, "lm_eval cannot run remote", "nothing is downloaded")


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_length_classes_hold_every_row_once_and_short_rows_do_not_pay_for_long_ones(lengths: list[int]) -> None:
    classes = length_classes(lengths)
    assert sorted(number for rows in classes for number in rows) == list(range(len(lengths)))
    for shorter, longer in zip(classes, classes[1:], strict=False):
        assert max(lengths[row] for row in shorter) <= min(lengths[row] for row in longer)
    many = [8] * 500 + [900] * 3
    assert [len(rows) for rows in length_classes(many)] == [500, 3] and len(length_classes([8, 9, 900])) == 1
