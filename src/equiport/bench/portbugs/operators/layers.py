"""Bugs in decoder layers: residuals, branches, placement of norms."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn

from equiport.bench.portbugs.operator import BugOperator, edit_output, modules, wrap_forward


def _layers(model: nn.Module) -> list[Any]:
    inner: Any = getattr(model, "model", None) or model.gpt_neox
    return list(inner.layers)


class ResidualMultiplierDropped(BugOperator):
    """residual_multiplier is not read."""

    name, family = "residual_multiplier dropped", "granite"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):
            layer.residual_multiplier = 1.0


class ResidualMultiplierOnOne(BugOperator):
    """residual_multiplier scales the MLP's branch alone."""

    name, family = "residual_multiplier on one branch", "granite"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers: the attention's output is divided by it again."""
        config: Any = model.config
        multiplier = config.residual_multiplier
        for layer in _layers(model):
            _inside(layer, layer.self_attn, lambda out, m=multiplier: out / m)


def _inside(layer: Any, branch: Any, edit: Any) -> None:
    """Edit a branch's output where its layer adds it, not in the branch itself."""
    running = [False]

    def whole(original: Any, *args: Any, **kwargs: Any) -> Any:
        handle = branch.register_forward_hook(
            lambda module, inputs, out: (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)
        )
        running[0] = True
        try:
            return original(*args, **kwargs)
        finally:
            handle.remove()

    wrap_forward(layer, whole)


class SerialForParallel(BugOperator):
    """The MLP reads the sum with attention."""

    name, family = "serial branches for parallel", "gpt_neox"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):
            layer.use_parallel_residual = False


class ParallelForSerial(BugOperator):
    """Attention and MLP both read the layer's input."""

    name, family = "parallel branches for serial", "gpt_neox sequential"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):
            layer.use_parallel_residual = True


class ParallelLlama(BugOperator):
    """The MLP's norm reads the layer's input."""

    name, family = "MLP beside attention", "llama"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Tensor:
                kwargs.pop("use_cache", None)
                attention, _ = own.self_attn(hidden_states=own.input_layernorm(hidden_states), **kwargs)
                branch = own.mlp(own.post_attention_layernorm(hidden_states))
                return hidden_states + attention + branch  # type: ignore[no-any-return]

            wrap_forward(layer, forward)


class ResidualDropped(BugOperator):
    """The attention's output replaces the stream."""

    name, family = "attention residual dropped", "qwen3"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Tensor:
                kwargs.pop("use_cache", None)
                stream, _ = own.self_attn(hidden_states=own.input_layernorm(hidden_states), **kwargs)
                return stream + own.mlp(own.post_attention_layernorm(stream))  # type: ignore[no-any-return]

            wrap_forward(layer, forward)


class ResidualOfNormed(BugOperator):
    """The residual is taken after the norm."""

    name, family = "residual taken after the norm", "mistral"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """The MLP's residual in all layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Tensor:
                kwargs.pop("use_cache", None)
                attention, _ = own.self_attn(hidden_states=own.input_layernorm(hidden_states), **kwargs)
                normed = own.post_attention_layernorm(hidden_states + attention)
                return normed + own.mlp(normed)  # type: ignore[no-any-return]

            wrap_forward(layer, forward)


class PreForPost(BugOperator):
    """Norms stand before the branches where the source has them behind."""

    name, family = "norms before the branches", "olmo2"
    component, causes = ("layers.{i}",), ("norm placement",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Tensor:
                kwargs.pop("use_cache", None)
                normed = own.post_attention_layernorm(hidden_states)
                hidden_states = hidden_states + own.self_attn(hidden_states=normed, **kwargs)[0]
                return hidden_states + own.mlp(own.post_feedforward_layernorm(hidden_states))  # type: ignore[no-any-return]

            wrap_forward(layer, forward)


class PostNormSkipped(BugOperator):
    """The norm behind the attention is not called."""

    name, family = "norm behind the attention skipped", "gemma3"
    component, causes = ("layers.{i}", "post_attention_layernorm"), ("norm placement", "norm kind")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "post_attention_layernorm"):
            wrap_forward(found.module, lambda original, x: x)


class OneNormForBoth(BugOperator):
    """Both branches read the first norm."""

    name, family = "one norm for both branches", "stablelm"
    component, causes = ("layers.{i}",), ("norm placement", "wrong layer's weights")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Any:
                attention, _ = own.self_attn(hidden_states=own.input_layernorm(hidden_states), **kwargs)
                hidden_states = hidden_states + attention
                return hidden_states + own.mlp(own.input_layernorm(hidden_states))

            wrap_forward(layer, forward)


class MlpSkipped(BugOperator):
    """A layer's MLP is not added."""

    name, family = "MLP of a layer left out", "starcoder2"
    component, causes = ("layers.{i}", "mlp"), ("residual layout or multiplier", "scale or multiplier")

    def inject(self, model: nn.Module) -> None:
        """The last layer."""
        layer = _layers(model)[2]
        _inside(layer, layer.mlp, lambda out: out * 0)


class BranchScaled(BugOperator):
    """A branch is scaled by one over the root of the number of layers."""

    name, family = "depth scale on a model without", "qwen2"
    component, causes = ("layers.{i}", "mlp"), ("residual layout or multiplier", "scale or multiplier")

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        for found in modules(model, ".mlp"):
            edit_output(found.module, lambda out: out * 3**-0.5)


class WideResidual(BugOperator):
    """The sums of a layer in another order."""

    name, family, control = "control: parallel sum in another order", "phi", True

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for layer in _layers(model):

            def forward(original: Any, hidden_states: Tensor, own: Any = layer, **kwargs: Any) -> Any:
                kwargs.pop("use_cache", None)
                normed = own.input_layernorm(hidden_states)
                branch = own.mlp(normed)
                attention, _ = own.self_attn(hidden_states=normed, **kwargs)
                total = hidden_states + attention + branch
                return (total,) if transformers.__version__.startswith("4.") else total

            wrap_forward(layer, forward)
