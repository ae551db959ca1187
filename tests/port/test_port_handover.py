"""HANDOVER.md: names of this very port, settings that it takes, and code that runs as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.scaffold import Composer, write_modeling
from equiport.port.scaffold_handover import handover, summary
from equiport.port.translate_recipes import blocks_of
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import PortClasses, find_port_classes

from .families import FAMILIES, make_model


def handed_over(name: str, root: Path) -> tuple[str, Path, PortClasses, Path]:
    """(page, port, its classes, model)"""
    model = make_model(name, root)
    made = plan(fingerprint(model), "nxdi", {})
    composer = Composer(made.fingerprint, blocks_of(made))
    port = write_modeling(composer, root / "src")
    classes = find_port_classes(port)
    return handover(made, composer, model, port, classes), port, classes, model


def test_the_names_are_those_of_the_port(tmp_path: Path) -> None:
    page, port, classes, model = handed_over("granite", tmp_path)
    assert f'"{port.stem}",\n    "NeuronGraniteForCausalLM",' in page
    assert '_NEURON_SUPPORTED_MODELS["GraniteForCausalLM"]' in page
    assert "NEURON_COMPILED_ARTIFACTS" in page and "Nothing below was run on a device" in page
    assert "override_neuron_config={" not in page and "tp_degree=2," in page
    made = plan(fingerprint(model), "nxdi", {})
    lines = summary(made, port, classes, tmp_path / "HANDOVER.md")
    assert "NeuronGraniteForCausalLM(MODEL, config).compile(COMPILED)" in lines[0] and "not run on a device" in lines[2]


def test_what_a_port_refuses_is_turned_off(tmp_path: Path) -> None:
    page, *_ = handed_over("olmo2", tmp_path)
    assert 'override_neuron_config={"sequence_parallel_enabled": false}' in page
    assert "sequence_parallel_enabled=False," in page
    assert "tp_degree=1," in page and "`tp_degree` stays 1: the norms on queries and keys span all heads" in page


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_the_code_runs_up_to_the_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, port, classes, model = handed_over(name, tmp_path)
    load_adapter("nxdi").init_distributed()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None and str(model) in code[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(port.parent))
    module = __import__(port.stem)
    called: list[tuple[str, str]] = []
    causal = getattr(module, classes.causal)
    monkeypatch.setattr(causal, "__init__", lambda self, path, config: self.__dict__.update(path=path, config=config))
    for verb in ("compile", "load"):
        monkeypatch.setattr(causal, verb, lambda self, to, verb=verb: called.append((verb, to)))
    names: dict[str, object] = {}
    exec(compile(code[1], "HANDOVER.md", "exec"), names)
    assert called == [("compile", "compiled"), ("load", "compiled")]
    assert names["config"].hidden_size == FAMILIES[name]["hidden_size"]  # type: ignore[attr-defined]


def test_plan_texts_say_what_is_done_with_fused_projections(tmp_path: Path) -> None:
    for name, block, words in (
        ("phi3", "attention.fused_qkv_concat", "stays fused"),
        ("phi3", "mlp.gated_fused", "output halved"),
        ("gpt_neox", "attention.fused_qkv_per_head", "regrouped"),
    ):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(FAMILIES[name]))
        made = plan(fingerprint(folder), "nxdi", {})
        assert any(item.block == block and words in item.primitive for item in made.substitutions), name
