"""A fault of one layer, or of one kind of layers, is not drowned by its siblings; right layers are never accused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from math import exp, log
from typing import Literal

import pytest
import torch

from equiport.compare import Comparison, GateResult, Labels, Thresholds, Verdict, compare_3tensors, component_gate

SHIPPED = Thresholds()
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
#: Gives R of one draw: (layer, phase, seed).
Ratio = Callable[[int, Phase, int], float]


@functools.cache
def measured() -> Comparison:
    """A real comparison, to be relabelled: gates see numbers, not tensors."""
    ref = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    return compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), target_fp32=ref.clone())


def drawn(ratio: Ratio, layers: int, seeds: int = 3, component: str = "layers.{i}.norm") -> list[Comparison]:
    found = []
    for layer in range(layers):
        for phase in PHASES:
            for seed in range(seeds):
                labels = Labels(
                    component=component,
                    component_type="norm",
                    layer=layer,
                    seed=seed,
                    fixture="perturbed",
                    phase=phase,
                )
                update = {"labels": labels, "r_ratio": ratio(layer, phase, seed)}
                found.append(measured().model_copy(update=update))
    return found


def codes(result: GateResult) -> set[str]:
    return {item.code for item in result.reasons}


def noisy(rng: random.Random, mean: float, spread: float) -> float:
    return exp(rng.gauss(log(mean), spread))


def test_a_fault_of_the_last_layer_alone_fails() -> None:
    # measured where one layer's norm takes its variance in bf16: 1.24 to 1.29 in prefill, up to 1.41 in decode
    rng = random.Random(0)
    faulty = {"prefill": 1.26, "decode": 1.38}
    found = drawn(lambda layer, phase, seed: noisy(rng, faulty[phase], 0.04) if layer == 5 else 1.0, 6)
    siblings = drawn(lambda layer, phase, seed: 1.0, 6, component="layers.{i}.other_norm")
    result = component_gate([*found, *siblings], SHIPPED)
    assert result.verdict is Verdict.FAIL and codes(result) == {"R_LAYERS"}
    assert [item.subject for item in result.reasons] == ["layers.{i}.norm (layer 5)"]
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["r_geomean"] < 1.10


def test_a_fault_of_half_the_layers_fails() -> None:
    # a softmax in bf16 in every other layer; decode rounds more than the source in right layers too
    rng = random.Random(1)

    def ratio(layer: int, phase: Phase, seed: int) -> float:
        if phase == "decode":
            return noisy(rng, 1.04 if layer % 2 else 1.16, 0.04)
        return 1.0 if layer % 2 else noisy(rng, 1.15, 0.03)

    result = component_gate(drawn(ratio, 4), SHIPPED)
    assert result.verdict is Verdict.FAIL and codes(result) == {"R_LAYERS"}
    assert [item.subject for item in result.reasons] == ["layers.{i}.norm (layers 0, 2)"]


def test_a_faint_fault_asks_for_more_seeds_and_then_fails() -> None:
    by_seed = [1.09, 1.13, 1.14, 1.15, 1.12, 1.13]

    def ratio(layer: int, phase: Phase, seed: int) -> float:
        return by_seed[seed] if layer == 3 else 1.0

    few = component_gate(drawn(ratio, 4), SHIPPED)
    assert few.verdict is Verdict.INCONCLUSIVE and codes(few) == {"TOO_FEW_SEEDS"}
    assert component_gate(drawn(ratio, 4, seeds=6), SHIPPED).verdict is Verdict.FAIL


def test_one_layer_far_above_noisy_siblings_fails() -> None:
    rng = random.Random(2)
    result = component_gate(drawn(lambda layer, *_: noisy(rng, 1.3 if layer == 1 else 1.02, 0.02), 6), SHIPPED)
    assert result.verdict is Verdict.FAIL and codes(result) == {"R_LAYERS"}
    assert [item.subject for item in result.reasons] == ["layers.{i}.norm (layer 1)"]


def test_with_few_seeds_or_one_layer_nothing_is_said() -> None:
    two = drawn(lambda layer, *_: 1.19 if layer == 3 else 1.0, 4, seeds=2)
    assert component_gate(two, SHIPPED).verdict is Verdict.PASS
    one = drawn(lambda *_: 1.05, 1)
    assert component_gate(one, SHIPPED).verdict is Verdict.PASS


def test_a_calibrated_limit_of_the_type_holds_for_its_layers() -> None:
    found = drawn(lambda layer, *_: 1.23 if layer == 3 else 1.0, 4)
    assert component_gate(found, SHIPPED).verdict is Verdict.FAIL
    assert component_gate(found, Thresholds(tau_r_by_type={"norm": 1.25})).verdict is Verdict.PASS


def right_layers(rng: random.Random, layers: int) -> Ratio:
    """Prefill bit-equal, decode as measured of right attention: 1.05, layers 0.03 apart, draws 0.05 to 0.15."""
    means = [noisy(rng, 1.05, 0.03) for _ in range(layers)]
    spreads = [rng.choice((0.03, 0.05, 0.05, 0.08, 0.15)) for _ in range(layers)]
    return lambda layer, phase, seed: 1.0 if phase == "prefill" else noisy(rng, means[layer], spreads[layer])


def right_kinds(rng: random.Random, layers: int) -> Ratio:
    """Two right kinds of code: one bit-equal, one that rounds otherwise in decode, as high as measured."""
    other = right_layers(rng, layers)
    return lambda layer, phase, seed: 1.0 if layer % 2 else other(layer, phase, seed)


def right_reordered(rng: random.Random, layers: int) -> Ratio:
    """No draw is bit-equal: sums in another order, over-precise in places."""
    means = [noisy(rng, 0.98, 0.05) for _ in range(layers)]
    return lambda layer, phase, seed: noisy(rng, means[layer], 0.06)


def accused(kind: Callable[[random.Random, int], Ratio], seeds: int, trials: int) -> list[tuple[Verdict, str]]:
    """What the gate says of right layers, but for a type's mean near its own limit."""
    said = []
    for trial in range(trials):
        rng = random.Random(trial)
        layers = (3, 4, 6, 8, 30)[trial % 5]
        result = component_gate(drawn(kind(rng, layers), layers, seeds), SHIPPED)
        said += [
            (result.verdict, item.message) for item in result.reasons if item.code in ("R_LAYERS", "TOO_FEW_SEEDS")
        ]
    return said


@pytest.mark.parametrize("kind", [right_layers, right_kinds, right_reordered])
def test_right_layers_are_not_accused(kind: Callable[[random.Random, int], Ratio]) -> None:
    asked = accused(kind, 3, 100)
    assert len(asked) <= 3 and all(verdict is Verdict.INCONCLUSIVE for verdict, _ in asked)
    assert accused(kind, 9, 60) == []
