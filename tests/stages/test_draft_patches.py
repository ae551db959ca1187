"""Stage 4 drafts patches: of the broken ports' proven causes, and of causes that no broken port has."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from broken_ports import BROKEN
from test_right_from_wrong import SQUARE_LLAMA, Judged, compared, judged
from torch import Tensor, nn

from equiport.audit import audit_path
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.fixtures.weights import WeightKind
from equiport.localize.drafts import (
    Draft,
    Figure,
    OwnWeights,
    ReorderWeight,
    ScaleBias,
    SetActivation,
    SetEps,
    ShiftTokens,
    ShiftWeight,
    SoftmaxScale,
    TransposeWeight,
)  # fmt: skip
from equiport.reference.model import materialize
from equiport.stacks.loading import load_adapter
from equiport.stacks.patches import apply_patches
from equiport.stacks.port_classes import PortClasses
from equiport.stages.causes import Cause, CauseReport, innermost, prove_causes
from equiport.stages.change_points import Pattern
from equiport.stages.component_fixtures import TracePlan
from equiport.stages.draft_patches import draft_patches, write_drafts
from equiport.stages.patch_plan import PatchPlan, bad_layers
from equiport.stages.patched_mapping import with_patched_mapping
from equiport.stages.stage3 import LocalisationMetrics, Suspect

SEEDS, KINDS = (42, 43, 44), (WeightKind.PERTURBED,)
MENDED = (
    "rotation interleaved", "gate and up swapped", "eps", "kv heads tiled", "o_proj transposed",
    "decode position off by one", "a layer's weights in another", "rope theta x1.001",
    pytest.param("norm weight ignored", marks=pytest.mark.slow),
    pytest.param("variance in bf16", marks=pytest.mark.slow),
)  # fmt: skip


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tied Llama of test_right_from_wrong."""
    root = tmp_path_factory.mktemp("square")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps(SQUARE_LLAMA))
    torch.set_num_threads(1)
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 5, tiny=False).folder


def proven_causes(result: Judged) -> list[CauseReport]:
    failing = list(dict.fromkeys(reason.subject.split(" (")[0] for reason in result.components))
    found = prove_causes(result.experiment, innermost(failing), result.instances, Thresholds())
    return [report for report in found if report.proven]


@pytest.mark.parametrize("name", MENDED)
def test_a_drafted_patch_mends_the_port(name: str, square: Path, tmp_path: Path) -> None:
    edit = next(edit for edit in BROKEN if edit.name == name)
    result = judged(edit, square, tmp_path / "port", SEEDS, KINDS)
    assert result.components
    source = result.subject.modeling_file.read_bytes()
    patches = tmp_path / "patches"
    drafted = write_drafts(proven_causes(result), result.subject.classes, "nxdi", patches)
    assert drafted.written and not drafted.without
    adapter = load_adapter("nxdi")
    apply_patches(adapter, result.subject.modeling_file, patches)
    experiment, _ = with_patched_mapping(result.experiment, result.subject, adapter, square)
    reasons, instances = compared(experiment, result.subject, TracePlan(SEEDS, KINDS), square)
    assert instances and not reasons, reasons
    assert result.subject.modeling_file.read_bytes() == source
    found = audit_path(patches)
    assert found.clean, found.findings
    for path in drafted.written:
        assert _imported(path) <= {"__future__", "re", "torch", "torch.nn", "modeling_llama_nxdi"}


def _imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


HEADS, HEAD, GROUPS = 6, 4, 2
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=HEAD, hidden_size=24, vocab_size=11
)
KEYS = ("layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.bias")


class _Port:
    """A port whose conversion applies a defect, and whose model holds one attention, MLP and embedding."""

    def __init__(self, defect: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        class Causal:
            @staticmethod
            def convert_hf_to_neuron_state_dict(state_dict: dict[str, Tensor], config: object) -> dict[str, Tensor]:
                return defect(dict(state_dict))

        class Inner(nn.Module):
            def __init__(self, config: object) -> None:
                super().__init__()
                self.embed_tokens = nn.Embedding(11, 3)
                self.attention = nn.Identity()
                self.attention.softmax_scale = 1.0
                self.mlp = nn.Sequential()
                self.mlp.act_fn = nn.ReLU()

        self.module = ModuleType("drafted_port")
        self.module.Causal, self.module.Inner = Causal, Inner  # type: ignore[attr-defined]
        self.classes = PortClasses(Path("drafted_port.py"), inner="Inner", causal="Causal", config="Config")


@pytest.fixture
def port_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Port]]:
    def make(defect: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: state) -> _Port:
        made = _Port(defect)
        monkeypatch.setitem(sys.modules, "drafted_port", made.module)
        return made

    yield make


def report(draft: Draft | None, source: str, target: str = "", **plan: object) -> CauseReport:
    """A proven cause with this draft."""
    made = None
    if draft is not None:
        made = PatchPlan(draft=draft, sources=(source,), targets=(target,), **plan)  # type: ignore[arg-type]
    winner = Cause(kind="a kind", says="it is wrong", repair="make it right", r32=1e-6)
    return CauseReport(
        component="layers.{i}.mlp", layer=0, fixture="perturbed", before=3.0, proven=True, winner=winner, patch=made
    )


def patched(port: _Port, cause: CauseReport, folder: Path) -> None:
    """Draft, and apply twice."""
    (path,) = write_drafts([cause], port.classes, "nxdi", folder).written
    scope: dict[str, object] = {"__name__": "a_patch"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    for _ in range(2):
        scope["apply_layers_i_mlp_a_kind_patch"]()  # type: ignore[operator]


def _up(change: Callable[[Tensor], Tensor], leaf: str = "weight") -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda state: {key: change(value) if key.endswith(leaf) else value for key, value in state.items()}


def _halves(x: Tensor) -> Tensor:
    return x.view(2, -1, x.shape[1]).transpose(0, 1).reshape(x.shape)


def _spread(x: Tensor) -> Tensor:
    return x.view(-1, GROUPS, HEADS // GROUPS, HEAD).transpose(1, 2).reshape(x.shape)


OF = ("model.layers.0.mlp.up_proj",)
DEFECTS = {
    "transposed": (TransposeWeight(of=OF), _up(lambda x: x.t().reshape(x.shape))),
    "columns transposed": (
        ReorderWeight(of=OF, axis=1, order="channels and heads transposed"),
        _up(lambda x: x.view(-1, HEADS, HEAD).transpose(1, 2).reshape(x.shape)),
    ),
    "columns spread": (ReorderWeight(of=OF, axis=1, order="groups gathered"), _up(_spread)),
    "columns' heads reversed": (
        ReorderWeight(of=OF, axis=1, order="heads reversed"),
        _up(lambda x: x.view(-1, HEADS, HEAD).flip(1).reshape(x.shape)),
    ),
    "w - 1": (ShiftWeight(of=OF, by=1.0), _up(lambda x: x - 1)),
    "bias twice": (ScaleBias(of=OF, factor=0.5), _up(lambda x: x * 2, "bias")),
}


def checkpoint(rows: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(rows, 24), (rows, 24), (rows,)]
    return {key: torch.randn(shape, generator=generator) for key, shape in zip(KEYS, shapes, strict=True)}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_draft_undoes_its_defect(name: str, port_of: Callable[..., _Port], tmp_path: Path) -> None:
    draft, defect = DEFECTS[name]
    port, state = port_of(defect), checkpoint()
    convert = lambda: port.module.Causal.convert_hf_to_neuron_state_dict(state, CONFIG)  # noqa: E731
    assert not all(torch.equal(convert()[key], state[key]) for key in KEYS)
    patched(port, report(draft, "model.layers.{i}.mlp.up_proj"), tmp_path)
    assert all(torch.allclose(convert()[key], state[key], atol=1e-6) for key in KEYS)


@pytest.mark.parametrize(
    ("order", "defect"),
    [
        ("halves swapped", lambda x: x.roll(x.shape[0] // 2, 0)),
        ("part the interleaved", _halves),
        ("interleave halves", lambda x: x.view(-1, 2, x.shape[1]).transpose(0, 1).reshape(x.shape)),
        ("swap neighbours", lambda x: x.view(-1, 2, x.shape[1]).flip(1).reshape(x.shape)),
        ("reversed", lambda x: x.flip(0)),
    ],
)
def test_rows_are_put_back(
    order: str, defect: Callable[[Tensor], Tensor], port_of: Callable[..., _Port], tmp_path: Path
) -> None:
    port = port_of(_up(defect))
    state = {key: value for key, value in checkpoint().items() if key.endswith("weight")}
    draft = ReorderWeight(of=OF, axis=0, order=order)  # type: ignore[arg-type]
    patched(port, report(draft, "model.layers.{i}.mlp.up_proj"), tmp_path)
    given = port.module.Causal.convert_hf_to_neuron_state_dict(state, CONFIG)
    assert all(torch.equal(given[key], state[key]) for key in state)


def test_own_weights_leave_the_other_module_its_own(port_of: Callable[..., _Port], tmp_path: Path) -> None:
    port, state = port_of(lambda state: {**state, KEYS[0]: state[KEYS[1]] * 1.0}), checkpoint()
    draft = OwnWeights(of=OF, other="model.layers.1.mlp.up_proj")
    patched(port, report(draft, OF[0], other=draft.other), tmp_path)
    given = port.module.Causal.convert_hf_to_neuron_state_dict(state, CONFIG)
    assert all(torch.equal(given[key], state[key]) for key in KEYS)


def test_modules_are_corrected_when_they_are_made(port_of: Callable[..., _Port], tmp_path: Path) -> None:
    port = port_of()
    scale = SoftmaxScale(of=("x",), scale=Figure(value=0.5, field="head_dim", power=-0.5))
    patched(port, report(scale, "x", "attention"), tmp_path / "scale")
    assert port.module.Inner(CONFIG).attention.softmax_scale == pytest.approx(HEAD**0.5)
    port = port_of()
    patched(port, report(SetActivation(of=("x",), name="silu"), "x", "mlp"), tmp_path / "act")
    x = torch.linspace(-2, 2, 7)
    assert torch.equal(port.module.Inner(CONFIG).mlp.act_fn(x), nn.functional.silu(x))
    port = port_of()
    patched(port, report(ShiftTokens(of=("x",), by=-1), "x", "embed_tokens"), tmp_path / "ids")
    embedding = port.module.Inner(CONFIG).embed_tokens
    assert torch.equal(embedding(torch.tensor([0, 5])), embedding.weight[[10, 4]])


def test_a_draft_that_does_not_fit_says_so_and_changes_nothing(port_of: Callable[..., _Port], tmp_path: Path) -> None:
    port = port_of()
    patched(port, report(SetEps(of=("x",), value=1e-6), "x", "layers.{i}.norm"), tmp_path / "lost")
    with pytest.raises(RuntimeError, match="does not fit: the port has no module"):
        port.module.Inner(CONFIG)
    port = port_of()
    patched(port, report(SetEps(of=("x",), value=1e-6), "x", "attention"), tmp_path / "eps")
    with pytest.raises(RuntimeError, match="holds no eps"):
        port.module.Inner(CONFIG)
    port = port_of()
    patched(port, report(ShiftWeight(of=("x",), by=1.0), "model.layers.{i}.norm"), tmp_path / "weight")
    with pytest.raises(RuntimeError, match="does not fit: the checkpoint has no"):
        port.module.Causal.convert_hf_to_neuron_state_dict(checkpoint(), CONFIG)


def test_what_has_no_draft_is_said_with_its_remedy(port_of: Callable[..., _Port], tmp_path: Path) -> None:
    classes = port_of().classes
    eps = SetEps(of=("x",), value=1e-6)
    lacks = {
        "no inverse": report(None, "x"),
        "no single module": report(eps, "x"),
        "does not call norm": report(eps, "x", "norm", not_called=("norm",)),
    }
    for words, cause in lacks.items():
        drafted = write_drafts([cause], classes, "nxdi", tmp_path / "patches")
        assert not drafted.written and words in drafted.without[0] and "make it right" in drafted.without[0]
    assert "no template" in write_drafts([report(eps, "x", "norm")], classes, "another", tmp_path).without[0]
    assert not (tmp_path / "patches").exists()


def test_stage_3_without_a_draft_is_a_clear_error(port_of: Callable[..., _Port], tmp_path: Path) -> None:
    classes = port_of().classes
    for cause, words in ((report(None, "x"), "make it right"), (None, "no cause is proven")):
        suspect = Suspect(
            rank=1, component="mlp", layer=0, fixture="real", phase="prefill", pattern=Pattern.STEP, r_ratio=9.0,
            r32=9.0, root_cause="x", description="x", source_modules=[], target_modules=[],
            consequences=[], cause=cause,
        )  # fmt: skip
        metrics = LocalisationMetrics(failing=["mlp"], suspects=[suspect], without_suspect=[])
        file = StageResult(stage=3, verdict=Verdict.PASS, metrics=metrics.model_dump(mode="json")).save(
            tmp_path / "stage3.json"
        )
        with pytest.raises(EquiportError, match=words):
            draft_patches(file, classes, "nxdi", tmp_path / "patches")


def test_the_same_draft_of_two_suspects_is_written_once_and_what_is_there_stays(
    port_of: Callable[..., _Port], tmp_path: Path
) -> None:
    classes = port_of().classes
    swap = TransposeWeight(of=OF)
    again = TransposeWeight(of=("model.layers.1.mlp.up_proj",))
    both = [report(swap, "model.layers.{i}.mlp.up_proj"), report(again, "model.layers.{i}.mlp.up_proj")]
    (path,) = write_drafts(both, classes, "nxdi", tmp_path).written
    path.write_text("# by hand")
    kept = write_drafts(both, classes, "nxdi", tmp_path)
    assert kept.kept == (path,) and not kept.written and path.read_text() == "# by hand"


def test_the_plan_is_stored_and_read_back(tmp_path: Path) -> None:
    cause = report(SetEps(of=("model.norm",), value=1e-5), "model.norm", "norm", layers=(1, 3))
    assert CauseReport.model_validate_json(cause.model_dump_json()) == cause
    assert bad_layers([]) is None
