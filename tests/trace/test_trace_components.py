"""One traced run of both models: what each component gives on the same inputs, in prefill and in decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worlds import EXAMPLE_PORT

from equiport.errors import EquiportError
from equiport.fixtures.tokens import draw_batch
from equiport.reference.model import load_reference, real_fixture
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.structure.mapping import ComponentMapping, MappingEntry
from equiport.trace.components import instances_of, trace_components
from equiport.trace.reference import capture_reference
from equiport.trace.sample import ComponentSample, load_samples, save_samples

MAPPING = ComponentMapping(
    (
        MappingEntry(("model.embed_tokens",), ("embed_tokens",), component_type="embedding"),
        MappingEntry(("model.layers.{i}",), ("layers.{i}",), indices=((0,), (1,)), component_type="decoder_layer"),
        MappingEntry(("model.layers.{i}.mlp",), ("layers.{i}.mlp",), indices=((0,), (1,)), component_type="mlp"),
        MappingEntry(("model.layers.{i}.mlp.down_proj",), ("layers.{i}.mlp.down_proj",), indices=((0,), (1,))),
        MappingEntry(("model.rotary_emb",), ("layers.{i}.self_attn.rotary_emb",), indices=((0,), (1,))),
        MappingEntry((), ("lm_head",), "explained"),
    )
)


@pytest.fixture(scope="module")
def samples(tiny_model: Path) -> tuple[ComponentSample, ...]:
    adapter = load_adapter("nxdi")
    adapter.init_distributed(1)
    batch = draw_batch(131, (9, 6), 3, 1)
    classes = find_port_classes(EXAMPLE_PORT)
    result = trace_components(adapter, EXAMPLE_PORT, classes, MAPPING, real_fixture(tiny_model), {1: batch})
    assert result.load.clean
    return result.samples


def test_levels_hold_one_another() -> None:
    levels = {instance.target: instance.level for instance in instances_of(MAPPING)}
    assert levels["layers.0.mlp.down_proj"] == 0 and levels["layers.0.mlp"] == 1 and levels["layers.0"] == 2
    assert levels["embed_tokens"] == 0 and "lm_head" not in levels and len(levels) == 9


def test_every_component_is_sampled_in_both_phases(samples: tuple[ComponentSample, ...]) -> None:
    assert [sample.problem for sample in samples if sample.problem] == []
    places = {(sample.module, sample.phase) for sample in samples}
    for module in ("embed_tokens", "layers.0", "layers.1", "layers.1.mlp", "layers.0.mlp.down_proj"):
        assert {(module, "prefill"), (module, "decode")} <= places
    assert ("layers.0.self_attn.rotary_emb", "tables") in places


def test_a_correct_port_gives_what_the_reference_gives(samples: tuple[ComponentSample, ...]) -> None:
    for sample in samples:
        tensors = (sample.ref_fp32, sample.ref_bf16, sample.target, sample.target_fp32)
        assert all(tensor is not None for tensor in tensors)
        assert len({tensor.shape for tensor in tensors}) == 1, sample.name
        reference, _, target, exact = (tensor.double() for tensor in tensors)
        scale = reference.norm()
        assert (exact - reference).norm() < 1e-5 * scale, sample.name
        assert (target - reference).norm() < 0.05 * scale, sample.name
        if sample.phase == "prefill":
            assert reference.shape[0] == 9 + 6  # padding is left out
        if sample.phase == "decode":
            assert reference.shape[0] == 2 * 3


def test_samples_go_through_the_store(samples: tuple[ComponentSample, ...], tmp_path: Path) -> None:
    save_samples(tmp_path, samples)
    stored = load_samples(tmp_path, "layers.{i}.mlp")
    expected = [sample for sample in samples if sample.component == "layers.{i}.mlp"]
    assert [(s.name, s.layer, s.component_type) for s in stored] == [
        (s.name, s.layer, s.component_type) for s in expected
    ]
    for first, second in zip(stored, expected, strict=True):
        assert torch.equal(first.target, second.target) and first.target.dtype is second.target.dtype
    with pytest.raises(EquiportError, match="no trace of component 'nothing'"):
        load_samples(tmp_path, "nothing")


def test_the_reference_is_captured_and_fed(tiny_model: Path) -> None:
    model = load_reference(tiny_model, torch.float32)
    batch = draw_batch(131, (5, 3), 2, 4)
    paths = ["model.layers.1.mlp"]
    whole = capture_reference(model, batch, paths)
    assert whole.inputs[paths[0]].shape == whole.outputs[paths[0]].shape == (2, 7, 64)
    with torch.no_grad():
        assert torch.equal(model.get_submodule(paths[0])(whole.inputs[paths[0]]), whole.outputs[paths[0]])
    whole.inputs[paths[0]] *= 2
    fed = capture_reference(model, batch, paths, feed=whole)
    assert not torch.allclose(fed.outputs[paths[0]], whole.outputs[paths[0]])
    assert not [hook for module in model.modules() for hook in module._forward_hooks]
