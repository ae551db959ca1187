"""What a run of the reference excites: caps taken away one at a time, experts counted."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from equiport.fixtures.excitation import CAPS, Measured
from equiport.fixtures.tokens import TokenBatch
from equiport.reference.model import quiet_transformers
from equiport.trace.routing import watch_routers

# a cap this much larger acts on nothing
_FAR_OFF = 1e4


def measure(model: nn.Module, config: dict[str, Any], batch: TokenBatch) -> Measured:
    """Run the fp32 source `model` (config.json: `config`) on the batch, as it is and without each of its caps."""
    with watch_routers(model) as seen:
        logits = _logits(model, batch)
    experts = {path: (len(io.choice.unique()), io.experts) for path, io in seen.items()}
    keys = [key for key in CAPS if isinstance(config.get(key), (int, float)) and config[key]]
    if not keys or not _same(_changed(model, {}, batch), logits):
        return Measured(dict.fromkeys(keys), experts)
    caps: dict[str, float | None] = {}
    for key in keys:
        without = _changed(model, {key: float(config[key]) * _FAR_OFF}, batch)
        caps[key] = None if without is None else float((without - logits).norm() / logits.norm().clamp(min=1e-30))
    return Measured(caps, experts)


def _logits(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[tokens, V] of the real tokens, float64."""
    with torch.no_grad():
        out = model(input_ids=batch.padded(), attention_mask=batch.mask(), use_cache=False)
    return out.logits[batch.mask().bool()].double()  # type: ignore[no-any-return]


def _changed(model: Any, changes: dict[str, float], batch: TokenBatch) -> Tensor | None:
    """Logits of the same weights under a changed config; None where no twin of the model can be made."""
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    try:
        with quiet_transformers(), torch.device("meta"):
            twin = type(model)(config)
        for own, other in zip(twin.modules(), model.modules(), strict=True):
            own._parameters.update(other._parameters)
            own._buffers.update(other._buffers)
        return _logits(twin.eval(), batch)
    except Exception:  # a model that cannot be built on the meta device keeps a tensor outside its buffers
        return None


def _same(found: Tensor | None, logits: Tensor) -> bool:
    return found is not None and torch.equal(found, logits)
