"""Phase 4: the weight conversion of a scaffolded port, checked strictly and both ways on a tiny model.

Every source tensor must reach the port or be dropped for a known reason, every parameter of the port must be filled,
and the conversion must leave the dict it is given as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equiport.fixtures.folder import has_weights, tensor_headers
from equiport.stacks.contract import LoadReport, StackAdapter
from equiport.stacks.port_classes import PortClasses

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class WeightsCheck:
    """What the check found; empty tuples and True for a right conversion."""

    load: LoadReport
    changed_inputs: tuple[str, ...]
    unknown_tensors: tuple[str, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """Everything that is wrong, in words."""
        found = [f"{name}: the port has no value for it" for name in self.load.missing]
        found += [f"{name}: reaches no parameter of the port" for name in self.load.unexpected]
        found += [f"{name}: has another shape in the port" for name in self.load.mis_shaped]
        found += [f"{name}: the conversion changes the dict it is given" for name in self.changed_inputs]
        return (
            *found,
            *(f"{name}: is stored and the source model has no such tensor" for name in self.unknown_tensors),
        )


def check_weights(
    adapter: StackAdapter, port: Path, classes: PortClasses, tiny: Path, model: Path, *, seq_len: int = 32
) -> WeightsCheck:
    """Build the port on the CPU from the folder `tiny` and load its weights through the port's own conversion.

    `model`'s stored names, layer numbers left out, must be among the tiny model's.

    Raises:
        EquiportError: the port does not import, cannot be built, or its conversion fails.
    """
    built = adapter.create_model(
        port, classes.causal or classes.inner, classes.config, tiny, dtype=torch.float32, batch_size=2, seq_len=seq_len
    )
    load = adapter.load_weights(built, tiny, torch.float32)
    return WeightsCheck(load, _changed_inputs(built, tiny), _unknown(model, tiny))


def _changed_inputs(built: Any, tiny: Path) -> tuple[str, ...]:
    """Names that the conversion adds to, takes from or rewrites in its argument."""
    from safetensors.torch import load_file

    given: dict[str, Tensor] = {}
    for file in sorted(tiny.glob("*.safetensors")):
        given.update(load_file(str(file)))
    prefix = getattr(built, "_STATE_DICT_MODEL_PREFIX", "model.")
    state = {name.removeprefix(prefix): value for name, value in given.items()}
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        built.convert_hf_to_neuron_state_dict(state, built.config)
    lost = set(before) ^ set(state)
    rewritten = {name for name in set(before) & set(state) if not torch.equal(before[name], state[name])}
    return tuple(sorted(lost | rewritten))


def _unknown(model: Path, tiny: Path) -> tuple[str, ...]:
    if not has_weights(model):
        return ()
    known = {_LAYER.sub("{i}", header.name) for header in tensor_headers(tiny)}
    found = {_LAYER.sub("{i}", header.name) for header in tensor_headers(model)}
    made_anew = re.compile(r"(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")
    return tuple(sorted(name for name in found - known if not made_anew.search(name)))
