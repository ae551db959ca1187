"""equiv_config.json: every field validated, every bad one named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import CAUSAL, CONFIG, INNER, Cli, World

from equiport.errors import EquiportError
from equiport.experiment import Experiment, load_config
from equiport.experiment.config import config_from


def good(world: World) -> dict[str, object]:
    return {
        "SOURCE_MODEL_PATH": str(world.model), "TARGET_MODELING_FILE": str(world.port), "TARGET_INNER_CLASS": INNER,
        "TARGET_CAUSAL_CLASS": CAUSAL, "TARGET_CONFIG_CLASS": CONFIG, "EXP_DIR": str(world.exp),
    }  # fmt: skip


def test_goes_round(fresh: World) -> None:
    config = config_from(good(fresh), "here")
    config.save(fresh.exp)
    assert load_config(fresh.exp) == config
    assert json.loads((fresh.exp / "equiv_config.json").read_text())["SOURCE_MODEL_PATH"] == str(fresh.model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("SOURCE_MODEL_PATH", "/no/such/folder", "/no/such/folder does not exist"),
        ("TARGET_MODELING_FILE", "/no/such.py", "/no/such.py does not exist"),
        ("TARGET_INNER_CLASS", "", "at least 1 character"),
        ("TARGET_CONFIG_CLASS", None, "valid string"),
        ("tp_degree", 0, "greater than or equal to 1"),
        ("tp_degree", "two", "valid integer"),
        ("through", 8, "less than or equal to 7"),
        ("tp_degre", 2, "not permitted"),
    ],
)
def test_a_bad_field_is_named(fresh: World, field: str, value: object, message: str) -> None:
    (fresh.exp).mkdir()
    (fresh.exp / "equiv_config.json").write_text(json.dumps({**good(fresh), field: value}))
    with pytest.raises(EquiportError, match=message) as raised:
        load_config(fresh.exp)
    assert raised.value.field == field
    assert raised.value.where.endswith("equiv_config.json")
    assert raised.value.remedy and "\n" not in raised.value.line()


def test_a_missing_field_is_named(fresh: World) -> None:
    raw = good(fresh)
    del raw["EXP_DIR"]
    with pytest.raises(EquiportError, match=r"here: EXP_DIR: Field required\. Correct"):
        config_from(raw, "here")


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_no_object(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "equiv_config.json").write_text(content)
    with pytest.raises(EquiportError, match=r"equiv_config\.json: (must be a JSON object|is no JSON|no such file)"):
        load_config(tmp_path)


def test_found_upwards(fresh: World) -> None:
    config_from(good(fresh), "here").save(fresh.exp)
    deep = fresh.exp / "a" / "b"
    deep.mkdir(parents=True)
    found = Experiment.find(deep)
    assert found is not None and found.root == fresh.exp
    assert Experiment.find(fresh.model) is None


@pytest.mark.parametrize("command", ["validate", "report", "stage1", "stage2", "stage5", "stage6", "teacher_forced"])
@pytest.mark.parametrize(("content", "words"), [("{", ["is no JSON"]), ('{"EXP_DIR": 3}', ["SOURCE_MODEL_PATH"])])
def test_every_command_names_a_bad_config(fresh: World, cli: Cli, command: str, content: str, words: list[str]) -> None:
    fresh.exp.mkdir()
    (fresh.exp / "equiv_config.json").write_text(content)
    flags = {
        "validate": [fresh.exp],
        "report": [fresh.exp],
        "stage2": ["--tests-dir", fresh.port.parent, "--exp-dir", fresh.exp],
        "stage6": ["--teacher-forced", fresh.exp / "results" / "teacher_forced.json"],
    }.get(command, [*fresh.port_flags, "--exp-dir", fresh.exp])
    assert cli(command, *flags).is_clear_error(2, "equiv_config.json", *words)
    assert [path.name for path in fresh.exp.iterdir()] == ["equiv_config.json"]
