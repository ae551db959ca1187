"""Bugs in positions: which layers have them, where they are counted from, in prefill and in decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equiport.bench.portbugs.operator import BugOperator, attentions, modules, wrap_forward


class RotatedWithoutPositions(BugOperator):
    """Layers that have no positions are rotated."""

    name, family = "rotation on NoPE layers", "cohere2"
    component, causes = ("self_attn",), ("NoPE layers",)

    def inject(self, model: nn.Module) -> None:
        """The global layers take the branch that rotates."""
        for attention in attentions(model):
            attention.sliding_window = attention.config.sliding_window


class NotRotated(BugOperator):
    """A layer with positions is not rotated."""

    name, family = "no rotation on a layer with positions", "smollm3"
    component, causes = ("self_attn",), ("NoPE layers",)

    def inject(self, model: nn.Module) -> None:
        """Off by one in the list of layers."""
        attentions(model)[2].use_rope = 0


class NopeListInverted(BugOperator):
    """no_rope_layers is read the other way round."""

    name, family = "no_rope_layers read inverted", "smollm3 first without rope"
    component, causes = ("self_attn",), ("NoPE layers",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.use_rope = not attention.use_rope


def _decode_positions(model: nn.Module, moved: Callable[[Tensor], Tensor]) -> None:
    """In decode (one token with a cache before it) ask for the tables of other positions."""

    def made(original: Any, x: Tensor, positions: Tensor) -> Any:
        late = x.shape[1] == 1 and int(positions.max()) > 0
        return original(x, moved(positions) if late else positions)

    for found in modules(model, "rotary_emb"):
        wrap_forward(found.module, lambda original, x, position_ids, *a: made(original, x, position_ids))


class DecodeOneLate(BugOperator):
    """Positions in decode are one too high."""

    name, family = "position + 1 in decode", "llama"
    component, causes = ("self_attn",), ("position offset",)

    def inject(self, model: nn.Module) -> None:
        """The tables handed to the layers."""
        _moved_in_decode(model, lambda positions: positions + 1)


class DecodeStandsStill(BugOperator):
    """Every decoded token has the position of the first."""

    name, family = "position stands still in decode", "qwen2"
    component, causes = ("self_attn",), ("position offset",)

    def inject(self, model: nn.Module) -> None:
        """The first decode position of a cache is kept."""
        first: dict[int, Tensor] = {}

        def still(positions: Tensor, key: int) -> Tensor:
            return first.setdefault(key, positions.clone())

        for attention in attentions(model):

            def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
                cache, positions = kwargs.get("cache"), kwargs["position_ids"]
                if positions.shape[-1] > 1 or not int(positions.max()):
                    first.pop(id(cache), None)
                elif positions is not None and cache is not None:
                    held = still(positions, id(cache))
                    x = kwargs["hidden_states"]
                    kwargs["position_embeddings"] = model.model.rotary_emb(x, held)  # type: ignore[union-attr,operator]
                return original(*args, **kwargs)

            wrap_forward(attention, forward)


class PrefillFromOne(BugOperator):
    """Positions of the prompt are counted from one, those of decode from the prompt's length."""

    name, family = "positions from one in prefill", "qwen3"
    component, causes = ("self_attn",), ("position offset",)

    def inject(self, model: nn.Module) -> None:
        """The tables handed to the layers."""
        for attention in attentions(model):

            def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
                positions = kwargs["position_ids"]
                if positions.shape[-1] > 1:
                    tables = model.model.rotary_emb(kwargs["hidden_states"], positions + 1)  # type: ignore[union-attr,operator]
                    kwargs["position_embeddings"] = tables
                return original(*args, **kwargs)

            wrap_forward(attention, forward)


def _moved_in_decode(model: nn.Module, moved: Callable[[Tensor], Tensor]) -> None:
    for attention in attentions(model):

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            positions = kwargs["position_ids"]
            if positions.shape[-1] == 1 and int(positions.max()) > 0:
                x = kwargs["hidden_states"]
                kwargs["position_embeddings"] = model.model.rotary_emb(x, moved(positions))  # type: ignore[union-attr,operator]
            return original(*args, **kwargs)

        wrap_forward(attention, forward)


class DecodeTablesRestart(BugOperator):
    """The rotary module counts from zero again in decode."""

    name, family = "positions restart in decode", "hunyuan"
    component, causes = ("self_attn", "rotary_emb"), ("position offset",)

    def inject(self, model: nn.Module) -> None:
        """Position 0 for every decoded token."""
        _decode_positions(model, lambda positions: positions * 0)
