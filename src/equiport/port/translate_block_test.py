"""test_block_correctness: one translated block against the source's class, on the same weights and the same inputs.

The result is judged by the gates of the comparison core: float32 against float32 first (R32), then bfloat16 relative to
the source's own bfloat16 error. The tolerance of 1e-3 that the translate-model workflow names is reported beside.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.compare.baseline import split_reduction
from equiport.compare.comparison import Comparison, Labels
from equiport.compare.gates import GateResult
from equiport.compare.gates_components import component_gate
from equiport.compare.records import append_record, make_record
from equiport.compare.threeway import compare_3tensors
from equiport.compare.thresholds import SHIPPED_THRESHOLDS, Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.trace.module_io import output_tensors

_ATOL = 1e-3
_SIDES = ("ref_fp32", "ref_bf16", "target", "target_fp32")
_RANK_TENSORS = ("rank_util.rank",)
_ROUTED = 1.4  # a router that flips one token moves a single draw this far


@dataclass(frozen=True)
class BlockInputs:
    """Keyword or positional arguments of one call of the port's block, and of the source's."""

    target: Any
    reference: Any


@dataclass(frozen=True)
class BlockResult:
    """The comparisons of one block, their verdict, and the largest absolute difference in float32."""

    comparisons: tuple[Comparison, ...]
    gate: GateResult
    max_abs_fp32: float

    @property
    def passed(self) -> bool:
        """PASS and nothing less."""
        return self.gate.verdict is Verdict.PASS


SyncWeights = Callable[[nn.Module, nn.Module], None]


def test_block_correctness(
    neuron_block_class: type[nn.Module] | Callable[..., nn.Module],
    pytorch_block_class: type[nn.Module] | Callable[..., nn.Module],
    weight_mapping: Mapping[str, str],
    config: Any = None,
    neuron_init_kwargs: Mapping[str, Any] | None = None,
    pytorch_init_kwargs: Mapping[str, Any] | None = None,
    example_inputs: Sequence[Any] | None = None,
    test_inputs: Sequence[Any] | None = None,
    reference_inputs: Sequence[Any] | None = None,
    seed: int = 42,
    batch_size: int | None = None,
    seq_len: int | None = None,
    hidden_size: int | None = None,
    use_moe: bool = False,
    sync_weights_fn: SyncWeights | None = None,
    verbose: bool = True,
) -> BlockResult:
    """Compare a translated block with the class it is a translation of.

    `weight_mapping`: the port's parameter -> the source's. `sync_weights_fn(neuron_block, pytorch_block)` does what a
    renaming cannot. Every parameter of the port must be set by one of them.
    `test_inputs`: for each call the arguments of the port's block (a tensor, a tuple or a dict of keywords); else
    `example_inputs`; else one drawn hidden tensor [batch_size, seq_len, hidden_size]. `reference_inputs`: those of the
    source's block where they differ. All of them are used. `config` is given as `config=` to a class that takes it.
    An input may also be a function of the dtype. The leading tensors that both blocks return are compared.

    Raises:
        AssertionError: the block is not correct, with the figures.
        EquiportError: a parameter that nothing synchronises, a name that does not exist, or inputs that do not pair.
    """
    calls = _calls(test_inputs, example_inputs, reference_inputs, (batch_size, seq_len, hidden_size), config, seed)
    torch.manual_seed(seed)
    reference = _made(pytorch_block_class, config, pytorch_init_kwargs)
    _perturb(reference, seed)
    outputs: dict[str, list[tuple[Tensor, ...]]] = {
        "ref_fp32": _run(reference, [call.reference for call in calls], torch.float32),
        "ref_bf16": _run_in_bf16(copy.deepcopy(reference), [call.reference for call in calls]),
    }
    for name, dtype in (("target", torch.bfloat16), ("target_fp32", torch.float32)):
        block = _made(neuron_block_class, _with_dtype(config, dtype), _in_dtype(neuron_init_kwargs, dtype)).eval()
        _synchronise(block, reference, weight_mapping, sync_weights_fn)
        outputs[name] = _run(block, [call.target for call in calls], dtype)
    label = getattr(neuron_block_class, "__name__", "block")
    found, largest = _compared(outputs, label, seed)
    limit = _ROUTED if use_moe else SHIPPED_THRESHOLDS.r_single
    result = BlockResult(found, component_gate(found, Thresholds(r_single=limit, r_geomean=limit)), largest)
    for comparison in found:
        append_record(make_record(comparison.name, comparison=comparison, result=result.gate, tolerance_ratio=100.0))
    line = _line(label, result)
    if verbose:
        print(line)
    assert result.passed, line
    return result


# not a test of whoever imports it
test_block_correctness.__test__ = False  # type: ignore[attr-defined]


def _calls(
    test_inputs: Sequence[Any] | None,
    example_inputs: Sequence[Any] | None,
    reference_inputs: Sequence[Any] | None,
    shape: tuple[int | None, int | None, int | None],
    config: Any,
    seed: int,
) -> list[BlockInputs]:
    given = list(test_inputs or example_inputs or ())
    if not given:
        hidden = shape[2] or getattr(config, "hidden_size", None)
        if hidden is None:
            raise EquiportError("no inputs", field="test_inputs", remedy="Give test_inputs, or hidden_size.")
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(shape[0] or 2, shape[1] or 24, int(hidden), generator=generator)]
    references = list(given if reference_inputs is None else reference_inputs)
    if len(references) != len(given):
        raise EquiportError(
            f"{len(given)} inputs for the port and {len(references)} for the source",
            field="reference_inputs",
            remedy="Give one for each call.",
        )
    return [BlockInputs(target, source) for target, source in zip(given, references, strict=True)]


def _made(cls: Callable[..., nn.Module], config: Any, kwargs: Mapping[str, Any] | None) -> nn.Module:
    arguments = dict(kwargs or {})
    takes = inspect.signature(cls).parameters
    if config is not None and "config" in takes and "config" not in arguments:
        arguments["config"] = config
    with torch.random.fork_rng():
        return cls(**arguments).eval()


def _with_dtype(config: Any, dtype: torch.dtype) -> Any:
    settings = getattr(config, "neuron_config", None)
    if settings is None:
        return config
    changed = copy.copy(config)
    object.__setattr__(changed, "neuron_config", copy.copy(settings))
    changed.neuron_config.torch_dtype = dtype
    return changed


def _in_dtype(kwargs: Mapping[str, Any] | None, dtype: torch.dtype) -> dict[str, Any]:
    return {name: _with_dtype(value, dtype) for name, value in (kwargs or {}).items()}


def _perturb(module: nn.Module, seed: int) -> None:
    """Weights under which a fault shows, exact in bfloat16."""
    from equiport.fixtures.weights import WeightKind, draw_weights

    module.load_state_dict(draw_weights(module.state_dict(), WeightKind.PERTURBED, seed, tied=False))


def _synchronise(block: nn.Module, reference: nn.Module, mapping: Mapping[str, str], sync: SyncWeights | None) -> None:
    own, source = dict(block.named_parameters()), reference.state_dict()
    wrong = [f"{name} (port)" for name in mapping if name not in own]
    wrong += [f"{name} (source)" for name in mapping.values() if name not in source]
    if wrong:
        raise EquiportError(
            f"no such parameter: {', '.join(wrong[:4])}",
            field="weight_mapping",
            remedy=f"The port's block has {', '.join(list(own)[:6])}.",
        )
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    for parameter in own.values():
        # what stays at NaN was set by nobody
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else 0)
    if sync is not None:
        sync(block, reference)
    for name, wanted in mapping.items():
        value = source[wanted]
        if value.shape != own[name].shape:
            raise EquiportError(
                f"{name} has shape {list(own[name].shape)}, {wanted} {list(value.shape)}", field="weight_mapping"
            )
        own[name].data.copy_(value)
    left = [name for name, parameter in block.named_parameters() if bool(torch.isnan(parameter).any())]
    for name, parameter in block.named_parameters():
        if name.endswith(_RANK_TENSORS):
            parameter.data.copy_(before[name])
    if left:
        raise EquiportError(
            f"{len(left)} parameters of the port are synchronised by nothing: {', '.join(left[:4])}",
            field="weight_mapping",
            remedy="Map every parameter, or set it in sync_weights_fn.",
        )


def _run(module: nn.Module, inputs: Sequence[Any], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    for parameter in module.parameters():
        # parameters alone: rotary frequencies are buffers that a bfloat16 model keeps in float32
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    results = []
    for given in inputs:
        with torch.no_grad():
            cast = _cast(given, dtype)
            output = (
                module(**cast) if isinstance(cast, dict) else module(*cast) if isinstance(cast, tuple) else module(cast)
            )
        tensors = output_tensors(output)
        if not tensors:
            raise EquiportError("returns no tensor", where=type(module).__name__, field="forward")
        results.append(tuple(tensor.detach() for tensor in tensors))
    return results


def _run_in_bf16(module: nn.Module, inputs: Sequence[Any]) -> list[tuple[Tensor, ...]]:
    """The baseline. Biases are added after the product is rounded, as a stack's sharded layers do."""
    biased = [name for name, one in module.named_modules() if isinstance(one, nn.Linear) and one.bias is not None]
    with split_reduction(module, 1, biased) if biased else nullcontext():
        return _run(module, inputs, torch.bfloat16)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `dtype`; a function is asked for the value in that dtype."""
    if callable(value):
        return value(dtype)
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return tuple(_cast(item, dtype) for item in value) if isinstance(value, (tuple, list)) else value


def _compared(
    outputs: Mapping[str, list[tuple[Tensor, ...]]], label: str, seed: int
) -> tuple[tuple[Comparison, ...], float]:
    """Every leading tensor that both sides return, of every call; and the largest difference in float32."""
    found, largest = [], 0.0
    for number, sides in enumerate(zip(*(outputs[key] for key in _SIDES), strict=True)):
        for place, (ref_fp32, ref_bf16, target, target_fp32) in enumerate(zip(*sides, strict=False)):
            found.append(
                compare_3tensors(
                    ref_fp32,
                    ref_bf16,
                    target,
                    target_fp32=target_fp32,
                    name=f"{label} [call {number}, output {place}]",
                    labels=Labels(component=label, component_type="block", fixture="perturbed", seed=seed),
                )
            )
            largest = max(largest, float((target_fp32.float() - ref_fp32.float()).abs().max()))
    return tuple(found), largest


def _line(label: str, result: BlockResult) -> str:
    worst = max((item.r_ratio for item in result.comparisons), default=float("nan"))
    fp32 = max((item.r32 for item in result.comparisons if item.r32 is not None), default=float("nan"))
    within = "within" if result.max_abs_fp32 <= _ATOL else "beyond"
    said = "; ".join(f"{reason.code}: {reason.message}" for reason in result.gate.reasons[:3])
    line = (
        f"{result.gate.verdict.value} {label}: {len(result.comparisons)} calls, R <= {worst:.3g}, R32 <= {fp32:.2g}, "
        f"largest difference in float32 {result.max_abs_fp32:.1e} ({within} atol {_ATOL:g})"
    )
    return line + (f" | {said}" if said else "")
