"""Every family: the composed port passes the pipeline, and each of its blocks broken is seen to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from equiport.errors import EquiportError
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan_substitution import placed_blocks
from equiport.port.scaffold import Composer, write_modeling
from equiport.stacks.contract import StackAdapter
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages.frame import Subject

from .families import FAMILIES, VARIANTS, cannot_build, judge, logits_error, make_model


@dataclass(frozen=True)
class Made:
    """A family's tiny model and its composed port."""

    model: Path
    composer: Composer
    port: Path


@pytest.fixture(scope="module")
def adapter() -> Iterator[StackAdapter]:
    torch.set_num_threads(1)
    made = load_adapter("nxdi")
    yield made
    made.cleanup()


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """name -> its model and port, made once."""
    made: dict[str, Made] = {}

    def make(name: str) -> Made:
        if cannot_build(name):
            pytest.skip(f"transformers {transformers.__version__} cannot build it: {cannot_build(name)}")
        if name not in made:
            root = tmp_path_factory.mktemp("family")
            model = make_model(name, root)
            found = fingerprint(root / "model-config")
            assert found.questions == () and found.unsupported == ()
            blocks = dict.fromkeys(block.block for block in placed_blocks(found))
            composer = Composer(found, blocks)
            assert set(blocks) <= {recipe.block for recipe in composer.recipes}
            assert composer.unserved() == {}
            made[name] = Made(model, composer, write_modeling(composer, root / "src"))
        return made[name]

    return make


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in VARIANTS])
def test_the_port_of_a_family_passes(name: str, family, adapter: StackAdapter, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    made = family(name)
    judgement = judge(made.port, made.model, tmp_path / "exp", adapter)
    assert not judgement.failures, "\n".join(judgement.failures)
    assert len(judgement.components) >= 12, judgement.untestable


@pytest.mark.parametrize("name", VARIANTS)
def test_the_port_of_a_variant_gives_the_reference_s_logits(name: str, family, adapter: StackAdapter) -> None:  # type: ignore[no-untyped-def]
    made = family(name)
    subject = Subject(made.model, find_port_classes(made.port), "nxdi")
    assert max(logits_error(subject, made.model, adapter)) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_each_block_of_a_family_broken_is_seen(
    name: str,
    family,
    adapter: StackAdapter,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    made = family(name)
    source, unseen = made.port.read_text(), []
    edits = made.composer.broken()
    if name != "llama":
        plain = {edit.name for edit in family("llama").composer.broken()}
        edits = tuple(edit for edit in edits if edit.name not in plain)
    assert edits or name == "llama tied, head_dim"  # llama's own blocks, with other switches
    for number, edit in enumerate(edits):
        assert source.count(edit.old) >= 1, edit
        folder = tmp_path / str(number)
        folder.mkdir()
        broken = folder / made.port.name
        broken.write_text(source.replace(edit.old, edit.new))
        subject = Subject(made.model, find_port_classes(broken), "nxdi")
        error = max(logits_error(subject, made.model, adapter))
        if not error > 1e-5:
            unseen.append(f"{edit.name}: {error:.1e}")
    assert unseen == []


@pytest.mark.parametrize(
    ("name", "edit", "component"),
    [("gemma2", "norm offset dropped", "norm"), ("phi3", "up taken for gate", "mlp")],
)
def test_the_gates_name_a_broken_block(
    name: str,
    edit: str,
    component: str,
    family,
    adapter: StackAdapter,
    tmp_path: Path,  # type: ignore[no-untyped-def]
) -> None:
    made = family(name)
    found = next(one for one in made.composer.broken() if one.name == edit)
    broken = tmp_path / made.port.name
    broken.write_text(made.port.read_text().replace(found.old, found.new))
    judgement = judge(broken, made.model, tmp_path / "exp", adapter)
    failed = [path for path, verdict in judgement.components.items() if verdict.value == "FAIL"]
    assert any(component in path for path in failed), judgement.failures


def test_norms_over_all_heads_refuse_several_ranks(family, adapter: StackAdapter) -> None:  # type: ignore[no-untyped-def]
    made = family("olmo2")
    source = made.port.read_text()
    guard = source.index("if config.neuron_config.tp_degree > 1:")
    assert "tp_degree > 1: the norms on queries and keys span all heads" in source[guard : guard + 240]
    broken = made.port.parent.parent / "ranks" / made.port.name
    broken.parent.mkdir()
    # the adapter runs one rank here: the guard is asked as if there were two
    broken.write_text(
        source.replace("if config.neuron_config.tp_degree > 1:", "if config.neuron_config.tp_degree > 0:")
    )
    subject = Subject(made.model, find_port_classes(broken), "nxdi")
    with pytest.raises(EquiportError, match=r"modeling_olmo2_nxdi\.py.*tp_degree > 1: the norms on queries") as refused:
        logits_error(subject, made.model, adapter)
    assert "\n" not in str(refused.value)
