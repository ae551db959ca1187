"""The corpus: what must be found, rule by rule, and what must be left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equiport.audit import RULES
from equiport.bench.audit.held_out import CHEATS, HONEST
from equiport.bench.audit.held_out_more import MORE_CHEATS, MORE_HONEST
from equiport.bench.family_models import FAMILIES

_LEGITIMATE = Path(__file__).parent / "legitimate"
#: Families whose generated ports are part of a quick run.
QUICK = ("llama", "gemma2", "phi3")


@dataclass(frozen=True)
class Cheat:
    """Files of one folder, and the rule that must speak. `held_out`: no sample of the rule itself."""

    name: str
    rule: str
    files: dict[str, str]
    held_out: bool


@dataclass(frozen=True)
class Honest:
    """Files of one folder, of which none may be flagged. `kind`: sample, hand-written or generated."""

    name: str
    kind: str
    files: dict[str, str]


def cheats() -> Iterator[Cheat]:
    """Every rule's own samples, then those that no rule was written with."""
    for rule in RULES:
        for number, sample in enumerate(rule.bad, 1):
            files = {sample.file: sample.code, **sample.beside}
            yield Cheat(f"{rule.id} {number}", rule.id, files, held_out=False)
    for name, (files, rule_id) in {**CHEATS, **MORE_CHEATS}.items():
        yield Cheat(name, rule_id, files, held_out=True)


def honest() -> Iterator[Honest]:
    """Honest tests and ports: small ones, and those written by hand in the style of contributed ports."""
    for name, files in {**HONEST, **MORE_HONEST}.items():
        yield Honest(name, "small", files)
    for folder in sorted(path for path in _LEGITIMATE.iterdir() if path.is_dir()):
        found = {
            str(file.relative_to(folder).with_suffix("")): file.read_text(encoding="utf-8")
            for file in sorted(folder.rglob("*.py.txt"))
        }
        yield Honest(folder.name, "hand-written", found)


def generated(families: tuple[str, ...], work: Path) -> Iterator[Honest]:
    """Units with their tests and the whole port of each family, as the recipes make them; component tests of one."""
    from equiport.port.fingerprint_reader import fingerprint
    from equiport.port.plan import plan
    from equiport.port.scaffold import Composer, write_modeling
    from equiport.port.translate import BLOCK_FILE, TEST_FILE, UnitRequest
    from equiport.port.translate_recipes import RecipeTranslator, blocks_of
    from equiport.stages.generate_tests import generate_tests
    from equiport.structure.mapping import ComponentMapping, MappingEntry

    for number, family in enumerate(families):
        model = work / f"model-{number}"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(FAMILIES[family]), encoding="utf-8")
        made = plan(fingerprint(model), "nxdi", {})
        translator = RecipeTranslator()
        for unit in made.units:
            files = translator.translate(UnitRequest(made, unit, model, work, FAMILIES[family]))
            yield Honest(f"{family}: {unit.id}", "generated", {BLOCK_FILE: files.block, TEST_FILE: files.test})
        port = write_modeling(Composer(made.fingerprint, blocks_of(made), made.stack), work / f"port-{number}")
        yield Honest(f"{family}: port", "generated", {port.name: port.read_text(encoding="utf-8")})
        if number == 0:
            kinds = ("norm", "embedding", "linear", "rotary", "mlp", "attention", "lm_head", "decoder_layer")
            entries = tuple(MappingEntry((f"model.{kind}",), (kind,), component_type=kind) for kind in kinds)
            written = generate_tests(work / "tests", ComponentMapping(entries), model, {})
            tests = {path.name: path.read_text(encoding="utf-8") for path in written}
            yield Honest(f"{family}: component tests", "generated", tests)


def written(files: dict[str, str], folder: Path) -> Path:
    """Write a folder of the corpus."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
