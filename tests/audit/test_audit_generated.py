"""What equiport generates is clean: units with their tests, composed ports, component tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from port.families import FAMILIES

from equiport.audit import audit_path
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.port_run_units import audit_unit, write_unit
from equiport.port.scaffold import Composer, write_modeling
from equiport.port.translate import UnitRequest
from equiport.port.translate_recipes import RecipeTranslator, blocks_of
from equiport.stages.generate_tests import generate_tests
from equiport.structure.mapping import ComponentMapping, MappingEntry


@pytest.mark.parametrize("family", ["gemma2", "granite", "gpt_neox"])
def test_a_generated_port_and_its_units_are_clean(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        key: value for key, value in FAMILIES[family].items() if key != "num_key_value_heads" or family[:4] != "gpt_"
    }
    (model / "config.json").write_text(json.dumps(config))
    made = plan(fingerprint(model), "nxdi", {})
    assert not made.open_questions
    for unit in made.units:
        files = RecipeTranslator().translate(UnitRequest(made, unit, model, tmp_path / "units" / unit.id, config))
        write_unit(tmp_path / "units", unit.id, files)
        refused = audit_unit(tmp_path / "units", unit.id)
        assert refused is None, refused
    write_modeling(Composer(made.fingerprint, blocks_of(made), made.stack), tmp_path / "src")
    found = audit_path(tmp_path / "src")
    assert found.clean and found.seconds < 5, found.counting


def test_generated_component_tests_are_clean(tiny_model: Path, tmp_path: Path) -> None:
    kinds = ("norm", "embedding", "linear", "rotary", "mlp", "attention", "decoder_layer")
    entries = tuple(MappingEntry((f"model.{kind}",), (kind,), component_type=kind) for kind in kinds)
    written = generate_tests(tmp_path, ComponentMapping(entries), tiny_model, {})
    assert len(written) == len(kinds) + 2
    found = audit_path(tmp_path)
    assert found.clean and not found.notes, found.counting
