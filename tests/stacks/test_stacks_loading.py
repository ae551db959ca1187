"""An adapter is found by name, by path and by entry point; what is not an adapter is refused with a remedy."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode
from equiport.stacks import loading
from equiport.stacks.contract import NotOffered, StackAdapter, Tier
from equiport.stacks.loading import bundled_adapters, known_stacks, load_adapter

COMPLETE = """
from equiport.stacks.contract import StackAdapter, StackStatus, Tier
from .words import GREETING

class TinyAdapter(StackAdapter):
    name = "tiny"
    def check_environment(self, *, compiled=False): return StackStatus("tiny", Tier.STAND_IN, GREETING, "1", "because")
    def init_distributed(self, tp_degree=1): pass
    def create_model(self, *args, **kw): raise NotImplementedError
    def load_weights(self, *args, **kw): raise NotImplementedError
    def forward(self, *args, **kw): raise NotImplementedError
    def device_inference(self, *args, **kw): raise NotImplementedError
    def inner_model(self, model): return model
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny_stack"
    folder.mkdir()
    (folder / "adapter.py").write_text(COMPLETE)
    (folder / "words.py").write_text('GREETING = "tiny stack"\n')
    return folder


def test_bundled_by_name() -> None:
    assert "nxdi" in bundled_adapters()
    assert "nxdi" in known_stacks()
    adapter = load_adapter("nxdi")
    assert isinstance(adapter, StackAdapter)
    assert adapter.name == "nxdi"
    assert load_adapter("nxdi") is not adapter


def test_bundled_by_its_path() -> None:
    assert load_adapter(content_dir("adapters") / "nxdi").name == "nxdi"


@pytest.mark.parametrize("given", ["folder", "file"])
def test_own_adapter_by_path(tiny: Path, given: str) -> None:
    adapter = load_adapter(tiny if given == "folder" else tiny / "adapter.py")
    status = adapter.check_environment()
    assert (status.name, status.tier) == ("tiny stack", Tier.STAND_IN)
    assert status.headline == "on the CPU stand-in"
    with pytest.raises(NotOffered, match="tiny"):
        adapter.limits(None)  # type: ignore[arg-type]
    adapter.cleanup()


def test_two_folders_of_the_same_name_do_not_mix(tmp_path: Path) -> None:
    for parent, word in (("a", "first"), ("b", "second")):
        folder = tmp_path / parent / "stack"
        folder.mkdir(parents=True)
        (folder / "adapter.py").write_text(COMPLETE)
        (folder / "words.py").write_text(f"GREETING = {word!r}\n")
    assert load_adapter(tmp_path / "a" / "stack").check_environment().name == "first"
    assert load_adapter(tmp_path / "b" / "stack").check_environment().name == "second"


def test_entry_point_wins_over_the_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="nxdi", value="tests_entry_point:Adapter", group=loading.ENTRY_POINT_GROUP)
    monkeypatch.setattr(loading, "entry_points", lambda group: [point])
    with pytest.raises(EquiportError, match="tests_entry_point:Adapter.*does not load.*Reinstall"):
        load_adapter("nxdi")
    other = EntryPoint(name="mine", value="equiport.stacks.contract:StackAdapter", group=loading.ENTRY_POINT_GROUP)
    monkeypatch.setattr(loading, "entry_points", lambda group: [other])
    assert "mine" in known_stacks()
    with pytest.raises(EquiportError, match="lacks check_environment, create_model"):
        load_adapter("mine")


def test_unknown_stack_names_the_known() -> None:
    with pytest.raises(EquiportError, match=r"target_stack: unknown stack 'nope'\. Known stacks: .*nxdi") as raised:
        load_adapter("nope")
    assert raised.value.exit_code is ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_here\n", "does not import: ModuleNotFoundError.*no_such_module_here"),
        ("x = 1\n", "found none where exactly one"),
        (COMPLETE.replace("class Tiny", "class Other") + COMPLETE, "found OtherAdapter, TinyAdapter"),
        (COMPLETE.replace("    def forward(self, *args, **kw): raise NotImplementedError\n", ""), "found none"),
    ],
)
def test_files_that_are_no_adapter(tiny: Path, source: str, message: str) -> None:
    (tiny / "adapter.py").write_text(source)
    with pytest.raises(EquiportError, match=message) as raised:
        load_adapter(tiny)
    assert str(tiny / "adapter.py") in raised.value.line()
