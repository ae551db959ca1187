"""Recipe folders: complete, with block ids that a plan can ask for, and clear about what they do not serve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.port import recipes
from equiport.port.fingerprint import Fingerprint
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan_blocks import BLOCKS, available_recipes, folder_of
from equiport.port.plan_substitution import placed_blocks
from equiport.port.recipes import load_recipe, load_recipes
from equiport.port.scaffold import Composer

from .families import FAMILIES

FOLDERS = sorted((content_dir("templates") / "recipes" / "nxdi").iterdir())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Fingerprint:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    return fingerprint(folder)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_recipe_folder_is_of_a_known_block_and_says_what_it_makes(folder: Path) -> None:
    block = json.loads((folder / "recipe.json").read_text())["block"]
    assert block in BLOCKS and folder.name == folder_of(block)
    recipe = load_recipe("nxdi", block)
    assert recipe is not None and recipe.summary
    assert recipe.slots or recipe.extends
    assert not recipe.extends or load_recipe("nxdi", recipe.extends) is not None
    files = {path.name for path in folder.iterdir()}
    assert files <= {"recipe.json", "block.py.j2", "weights.py.j2", "broken.json"}


def test_a_plan_finds_the_recipes() -> None:
    assert len(available_recipes("nxdi")) == len(FOLDERS) >= 35


def test_a_recipe_stands_behind_the_one_it_extends() -> None:
    order = [recipe.block for recipe in load_recipes("nxdi", ["attention.fused_qkv_per_head", "attention.gqa"])]
    assert order == ["attention.gqa", "attention.fused_qkv_per_head"]


def test_a_block_without_recipe_has_none() -> None:
    assert load_recipe("nxdi", "position.alibi") is None


def test_what_a_recipe_does_not_serve_is_said(llama: Fingerprint) -> None:
    assert llama.attention is not None
    odd = replace(llama, attention=replace(llama.attention, q_bias=True))
    composer = Composer(odd, dict.fromkeys(block.block for block in placed_blocks(odd)))
    assert composer.unserved()["attention.gqa"] == ("biases on some of q, k and v only",)


def test_a_faulty_recipe_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "nxdi" / "mlp_gated"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text('{"block": "mlp.ungated"}')
    monkeypatch.setattr(recipes, "content_dir", lambda _: tmp_path)
    with pytest.raises(EquiportError, match=r"recipe\.json: block: names another block"):
        load_recipe("nxdi", "mlp.gated")
    (folder / "recipe.json").write_text('{"block": "mlp.gated"}')
    (folder / "block.py.j2").write_text("text\n{# slot: mlp #}\nclass X: ...\n")
    with pytest.raises(EquiportError, match="text before its first slot"):
        load_recipe("nxdi", "mlp.gated")


def test_every_edit_of_a_recipe_has_another_text() -> None:
    for folder in FOLDERS:
        recipe = load_recipe("nxdi", json.loads((folder / "recipe.json").read_text())["block"])
        assert recipe is not None
        assert all(edit.old != edit.new for edit in recipe.broken)
