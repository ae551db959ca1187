"""The alive gate and the invariance checks on the example port: quiet where it is right, loud where it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from broken_ports import BROKEN, EXAMPLE, ids_masked, replaced
from worlds import TINY_LLAMA

from equiport.compare.gates_consistency import Consistency, Nudge, alive_gate, consistency_gate
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages.alive import nudge_all
from equiport.stages.component_fixtures import drawn_variants, drawn_weights
from equiport.stages.invariance import check_invariance

_FORWARD = "        attention = self.self_attn("
_BATCH_OF_ONE = f"        if hidden_states.shape[0] == 1:\n            hidden_states = hidden_states * 1.01\n{_FORWARD}"
_FAR = (
    "        if position_ids is not None:\n            far = (position_ids > 60).unsqueeze(-1)\n"
    f"            hidden_states = torch.where(far, hidden_states * 1.01, hidden_states)\n{_FORWARD}"
)
_COUNTED = (
    "        self.served = getattr(self, 'served', 0) + (past_key_value is None)\n"
    f"        if self.served > 2:\n            hidden_states = hidden_states * 1.01\n{_FORWARD}"
)


def _port(folder: Path, edit: Callable[[str], str]) -> Path:
    file = folder / "modeling_llama_nxdi.py"
    file.write_text(edit(EXAMPLE.read_text()))
    return file


def _broken(name: str) -> Callable[[str], str]:
    return next(edit.edit for edit in BROKEN if edit.name == name)


@pytest.mark.parametrize(
    "edit,said",
    [
        (lambda source: source, set()),
        (replaced((_FORWARD, _BATCH_OF_ONE)), {"one row", "a ragged batch of three"}),
        (replaced((_FORWARD, _FAR)), {"far positions and many steps"}),
        (replaced((_FORWARD, _COUNTED)), {"a ragged batch of three", "far positions and many steps", "one row"}),
        (_broken("decode position off by one"), {"a ragged batch of three", "far positions and many steps", "one row"}),
    ],
    ids=["right", "batch of one", "far positions", "third call", "decode position"],
)
def test_shapes_and_state(edit: Callable[[str], str], said: set[str], tiny_model: Path, tmp_path: Path) -> None:
    classes, adapter = find_port_classes(_port(tmp_path, edit)), load_adapter("nxdi")
    metrics, gate = check_invariance(adapter, classes, tiny_model, 42, Thresholds())
    assert gate.verdict is (Verdict.FAIL if said else Verdict.PASS), gate.reasons
    shaped = {reason.subject.split(" path, ")[-1] for reason in gate.reasons if not reason.subject.startswith("bf16")}
    assert shaped == said
    assert {item.shape for item in metrics.shapes} == {
        "a ragged batch of three", "far positions and many steps", "one row",
    }  # fmt: skip
    assert len(metrics.checks) == 7


_LAYER = "NeuronLlamaDecoderLayer(config) for _ in"
_FIFTH = replaced(
    (_LAYER, "_skewed(NeuronLlamaDecoderLayer(config), index) for index in"),
    ("class NeuronLlamaModel(", "def _skewed(layer, index):\n    if index > 3:\n"
     "        layer.mlp.register_forward_hook(lambda module, args, out: out * 1.01)\n    return layer\n\n\n"
     "class NeuronLlamaModel("),
)  # fmt: skip
_CLAMPED = replaced(("* self.up_proj(hidden_states)", "* self.up_proj(hidden_states).clamp(-20.0, 20.0)"))


@pytest.mark.parametrize(
    "edit,said",
    [(lambda source: source, set()), (_FIFTH, {"every layer"}), (_CLAMPED, {"loud channels"})],
    ids=["right", "the fifth layer", "an invented clamp"],
)
def test_layers_and_values_that_the_drawn_model_lacks(
    edit: Callable[[str], str], said: set[str], tiny_model: Path, tmp_path: Path
) -> None:
    """The source has six layers, the drawn model four."""
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    classes, adapter = find_port_classes(_port(tmp_path, edit)), load_adapter("nxdi")
    with drawn_weights(None, source, 42) as folder, drawn_variants(None, source, 42) as variants:
        assert [variant.name for variant in variants] == ["every layer", "loud channels"]
        metrics, gate = check_invariance(adapter, classes, folder, 42, Thresholds(), variants)
    assert {reason.subject.split(" path, ")[-1] for reason in gate.reasons} == said, gate.reasons
    assert gate.verdict is (Verdict.FAIL if said else Verdict.PASS)


_LOW_POSITIONS = """
    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        from neuronx_distributed_inference.modules.attention.utils import apply_rotary_pos_emb

        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids.to(V.dtype))
        Q, K = apply_rotary_pos_emb(Q, K, cos_cache, sin_cache)
        return Q, K, cos_cache, sin_cache


class NeuronLlamaMLP("""


def test_positions_in_bf16_are_seen_past_256(tmp_path: Path) -> None:
    """In fp32 such a port is right, and its rotary module is right in bf16, too."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**TINY_LLAMA, "max_position_embeddings": 512}))
    model = materialize(source, tmp_path / "model", WeightKind.PERTURBED, 3, tiny=False).folder
    edit = replaced(("\n\nclass NeuronLlamaMLP(", _LOW_POSITIONS))
    for form, verdict in ((lambda source: source, Verdict.PASS), (edit, Verdict.FAIL)):
        folder = tmp_path / verdict.name
        folder.mkdir()
        classes = find_port_classes(_port(folder, form))
        metrics, gate = check_invariance(load_adapter("nxdi"), classes, model, 42, Thresholds())
        assert gate.verdict is verdict and (metrics.far_r > 5) == (verdict is Verdict.FAIL)
        assert all(item.r32 < 1e-3 for item in metrics.shapes)
        assert {item.subject for item in gate.reasons} <= {"bf16, far positions and many steps"}


def test_a_source_of_few_layers_has_no_deeper_variant(tiny_model: Path) -> None:
    with drawn_variants(None, tiny_model, 42) as variants:
        assert [variant.name for variant in variants] == ["loud channels"]


def test_every_tensor_and_key_of_the_example_is_alive(tiny_model: Path) -> None:
    classes, adapter = find_port_classes(EXAMPLE), load_adapter("nxdi")
    nudges = nudge_all(adapter, classes, tiny_model, 42)
    gate = alive_gate(nudges, Thresholds())
    assert gate.verdict is Verdict.PASS and not gate.blind_spots, gate
    assert {"rms_norm_eps", "rope_theta"} <= {n.name for n in nudges if n.kind == "config key"}
    assert "hidden_act" in {n.name for n in nudges if n.kind == "config switch"}
    assert sum(n.kind == "tensor" for n in nudges) == 20  # 2 layers of 9, embedding, last norm; the head is tied


@pytest.mark.parametrize(
    "edit,code,subjects",
    [
        (_broken("norm weight ignored"), "DEAD_TENSOR", {"model.norm.weight"}),
        (replaced(("base=config.rope_theta,", "base=10000.0,")), "UNREAD_KEY", {"rope_theta"}),
        (replaced(("eps=config.rms_norm_eps)", "eps=1e-5)")), "UNREAD_KEY", {"rms_norm_eps"}),
    ],
    ids=["deaf norm", "rope_theta unread", "eps unread"],
)
def test_what_is_not_alive_is_named(
    edit: Callable[[str], str], code: str, subjects: set[str], tiny_model: Path, tmp_path: Path
) -> None:
    classes, adapter = find_port_classes(_port(tmp_path, edit)), load_adapter("nxdi")
    gate = alive_gate(nudge_all(adapter, classes, tiny_model, 42), Thresholds())
    assert gate.verdict is Verdict.FAIL
    assert subjects <= {reason.subject for reason in gate.reasons} and {r.code for r in gate.reasons} == {code}


def _nudge(reference: float, target: float | None, kind: str = "tensor") -> Nudge:
    return Nudge(kind=kind, name="x", reference=reference, target=target)


@pytest.mark.parametrize(
    "nudge,verdict",
    [
        (_nudge(0.1, 0.2), Verdict.PASS),
        (_nudge(0.1, 1e-6), Verdict.FAIL),
        (_nudge(1e-7, 0.1), Verdict.FAIL),
        (_nudge(1e-7, 2e-7), Verdict.PASS),
        (_nudge(0.1, None, "config key"), Verdict.PASS),
        (_nudge(1e-7, 0.1, "config key"), Verdict.PASS),
        (_nudge(0.1, 0.0, "config key"), Verdict.FAIL),
        (_nudge(0.1, float("nan")), Verdict.FAIL),
        (_nudge(0.1, 0.0, "config switch"), Verdict.PASS),
    ],
)
def test_alive_gate(nudge: Nudge, verdict: Verdict) -> None:
    assert alive_gate([nudge], Thresholds()).verdict is verdict


def test_a_switch_that_only_the_source_reads_is_a_blind_spot() -> None:
    gate = alive_gate([_nudge(0.1, 0.0, "config switch")], Thresholds())
    assert [spot.subject for spot in gate.blind_spots] == ["x"]


def test_nothing_run_is_no_pass() -> None:
    assert alive_gate([], Thresholds()).verdict is Verdict.NOT_RUN
    assert consistency_gate([], Thresholds()).verdict is Verdict.NOT_RUN


@pytest.mark.parametrize("difference,own,passes", [(1e-3, 0.0, True), (1.1e-3, 0.0, False), (4e-3, 1e-3, True),
                                                   (6e-3, 1e-3, False), (float("nan"), 0.0, False)])  # fmt: skip
def test_consistency_gate(difference: float, own: float, passes: bool) -> None:
    found = consistency_gate([Consistency(check="c", subject="s", difference=difference, own=own)], Thresholds())
    assert (found.verdict is Verdict.PASS) == passes


@pytest.mark.parametrize("mask,verdict", [("None", Verdict.PASS), ("self.pad", Verdict.FAIL)])
def test_a_padding_id_inside_a_prompt_is_a_token(mask: str, verdict: Verdict, tmp_path: Path) -> None:
    """It lies beyond the tiny vocabulary in the model's config, and is the one that pads there too."""
    (tmp_path / "source").mkdir()
    config = {**TINY_LLAMA, "vocab_size": 32000, "eos_token_id": [31998, 2], "pad_token_id": 31999}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    folder = materialize(tmp_path / "source", tmp_path / "model", WeightKind.PERTURBED, 7, tiny=True).folder
    classes = find_port_classes(_port(tmp_path, ids_masked(mask)))
    _, gate = check_invariance(load_adapter("nxdi"), classes, folder, 42, Thresholds())
    assert gate.verdict is verdict, gate.reasons
    if verdict is Verdict.FAIL:
        assert "prefill path, a ragged batch of three" in {reason.subject for reason in gate.reasons}
