"""The composed file reads as if it were written by hand: formatted, linted, typed names, no unused import."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equiport.errors import EquiportError
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan_substitution import placed_blocks
from equiport.port.scaffold import SECTIONS, Composer
from equiport.port.scaffold_source import Definition, definitions, import_lines, merged, tidy, with_imports

from .families import FAMILIES, cannot_build

STYLE = ["--line-length", "120"]
RULES = ["--select", "E,F,I,B,UP,SIM", "--target-version", "py310"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, config in FAMILIES.items():
        if cannot_build(name):
            continue
        folder = tmp_path_factory.mktemp("source")
        (folder / "config.json").write_text(json.dumps(config))
        found = fingerprint(folder)
        made[name] = Composer(found, dict.fromkeys(block.block for block in placed_blocks(found))).modeling_source()
    return made


@pytest.mark.skipif(shutil.which("ruff", path=str(Path(sys.executable).parent)) is None, reason="ruff is not installed")
def test_composed_ports_are_formatted_and_linted(sources: dict[str, str], tmp_path: Path) -> None:
    ruff = str(Path(sys.executable).parent / "ruff")
    for number, source in enumerate(sources.values()):
        (tmp_path / f"modeling_{number}.py").write_text(source)
    linted = subprocess.run([ruff, "check", *STYLE, *RULES, str(tmp_path)], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout
    formatted = subprocess.run(
        [ruff, "format", *STYLE, "--diff", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert formatted.returncode == 0, formatted.stdout


def test_classes_and_functions_of_a_port_have_docstrings_and_names_of_the_family(sources: dict[str, str]) -> None:
    for name, source in sources.items():
        tree = ast.parse(source)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        assert len(classes) >= 7, name
        assert all(
            ast.get_docstring(node)
            for node in [*classes, *tree.body]
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        )
    assert "class NeuronGPTNeoXForCausalLM(NeuronBaseForCausalLM)" in sources["gpt_neox"]
    assert '_STATE_DICT_MODEL_PREFIX = "gpt_neox."' in sources["gpt_neox"]


def test_a_port_reads_its_sizes_from_the_config(sources: dict[str, str]) -> None:
    for name, source in sources.items():
        numbers = {
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, int)
        }
        assert not numbers & {48, 80, 96, 131}, name


def test_units_make_the_same_port_as_the_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["gemma3"]))
    found = fingerprint(tmp_path)
    composer = Composer(found, dict.fromkeys(block.block for block in placed_blocks(found)))
    units = {
        "attention": composer.unit_source("a", ("norm", "rope", "attention")),
        "mlp": composer.unit_source("b", ("mlp",)),
        "layer": composer.unit_source("c", ("norm", "rope", "attention", "mlp", "layer")),
    }
    whole, assembled = ast.parse(composer.modeling_source()), ast.parse(composer.modeling_source(units))
    texts = [{ast.unparse(node) for node in tree.body} for tree in (whole, assembled)]
    assert texts[0] == texts[1]
    assert all(composer.section(name) for name in SECTIONS if name != "head")


def test_units_that_contradict_each_other_are_named() -> None:
    parts = [("attention", [Definition("f", "def f(): ...")]), ("mlp", [Definition("f", "def f(): pass")])]
    with pytest.raises(EquiportError, match="units attention and mlp define f differently"):
        merged(parts)


def test_source_helpers() -> None:
    assert import_lines(["import os", "from b import C, d, E", "from a import unused"], {"C", "d", "E", "os"}) == (
        "import os\n\nfrom b import C, E, d"
    )
    long = "x = call(" + ", ".join(f"argument_{number}={number}" for number in range(12)) + ")"
    assert max(len(line) for line in tidy(long).splitlines()) <= 120
    assert ast.dump(ast.parse(tidy(long))) == ast.dump(ast.parse(long))
    assert [item.name for item in definitions("# why\nX = 1\n\n\ndef f():\n    pass\n")] == ["X", "f"]
    with pytest.raises(EquiportError, match="composed source is no Python"):
        with_imports("doc", [], "def f(:\n")
