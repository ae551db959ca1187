"""Bugs in projections and fused layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import BugOperator, edit_output, modules, wrap_forward


def _without_bias(linear: Any) -> None:
    wrap_forward(linear, lambda original, x: F.linear(x, linear.weight))


def _reweighted(linear: Any, weight: Tensor) -> None:
    """Compute with another weight; the parameter itself stays as it was loaded."""
    wrap_forward(linear, lambda original, x: F.linear(x, weight, linear.bias))


class QkvBiasDropped(BugOperator):
    """The projections to queries, keys and values add no bias."""

    name, family, quick = "q/k/v bias dropped", "qwen2", True
    component, causes = ("_proj",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "q_proj", "k_proj", "v_proj"):
            _without_bias(found.module)


class KeyBiasNotLoaded(BugOperator):
    """The key projection's bias stays at its initial zeros."""

    name, family = "k bias left at zero", "starcoder2"
    component, causes = ("k_proj",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """One layer."""
        for found in modules(model, "layers.1.self_attn.k_proj"):
            found.module.bias.data = torch.zeros_like(found.module.bias)


class OutputBiasDropped(BugOperator):
    """o_proj adds no bias."""

    name, family = "o bias dropped", "llama biases"
    component, causes = ("o_proj",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "o_proj"):
            _without_bias(found.module)


class OutputBiasTwice(BugOperator):
    """Each of two ranks adds o_proj's bias before the sum over ranks."""

    name, family = "o bias added twice", "gpt_oss"
    component, causes = ("o_proj",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "o_proj"):
            linear = found.module

            def twice(out: Tensor, linear: Any = linear) -> Tensor:
                return out + linear.bias  # type: ignore[no-any-return]

            edit_output(linear, twice)


class MlpBiasDropped(BugOperator):
    """down_proj adds no bias."""

    name, family = "mlp bias dropped", "llama biases"
    component, causes = ("down_proj",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "down_proj"):
            _without_bias(found.module)


class OutputTransposed(BugOperator):
    """A square o_proj goes in untransposed."""

    name, family = "o_proj transposed", "llama"
    component, causes = ("o_proj",), ("transpose",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "o_proj"):
            _reweighted(found.module, found.module.weight.data.t().contiguous())


class ReshapedForTransposed(BugOperator):
    """A weight is reshaped where it should have been transposed."""

    name, family = "q_proj reshaped for transposed", "gemma2"
    component, causes = ("q_proj",), ("transpose",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "q_proj"):
            weight = found.module.weight.data
            _reweighted(found.module, weight.t().reshape(weight.shape).contiguous())


class FusedQkvChunked(BugOperator):
    """A query_key_value of per-head blocks is split into three thirds."""

    name, family = "fused qkv split as thirds", "gpt_neox"
    component, causes = ("query_key_value",), ("fused layout or head order",)

    def inject(self, model: nn.Module) -> None:
        """All layers: what comes out as [q | k | v] is read per head, as the source reads it."""
        heads = model.config.num_attention_heads  # type: ignore[union-attr]
        for found in modules(model, "query_key_value"):

            def thirds(out: Tensor) -> Tensor:
                return out.unflatten(-1, (3, heads, -1)).transpose(-3, -2).flatten(-3)

            edit_output(found.module, thirds)


class KeysAndValuesSwapped(BugOperator):
    """The fused projection is split as q, v, k."""

    name, family = "fused qkv split as q, v, k", "phi3"
    component, causes = ("qkv_proj",), ("fused layout or head order",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        config: Any = model.config
        width = config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        for found in modules(model, "qkv_proj"):
            edit_output(
                found.module,
                lambda out: torch.cat((out[..., :queries], out[..., queries + keys :], out[..., queries:-keys]), -1),
            )


class PermutedForPairs(BugOperator):
    """q and k rows are permuted for interleaved pairs, though the port rotates halves."""

    name, family = "q and k permuted for pairs", "mistral"
    component, causes = ("q_proj", "k_proj"), ("fused layout or head order",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        half = model.config.head_dim // 2  # type: ignore[union-attr,operator]
        for found in modules(model, "q_proj", "k_proj"):
            edit_output(found.module, lambda out: out.unflatten(-1, (-1, 2, half)).transpose(-1, -2).flatten(-3))


class QueryHeadsReversed(BugOperator):
    """The query heads stand in reverse order."""

    name, family = "query heads reversed", "qwen3"
    component, causes = ("q_proj",), ("fused layout or head order",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        heads: Any = model.config.num_attention_heads  # type: ignore[union-attr]
        for found in modules(model, "q_proj"):
            edit_output(found.module, lambda out: out.unflatten(-1, (heads, -1)).flip(-2).flatten(-2))


class HeadsTransposedIntoOutput(BugOperator):
    """o_proj reads channels before heads."""

    name, family = "o_proj reads channels before heads", "granite"
    component, causes = ("o_proj",), ("fused layout or head order",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        heads: Any = model.config.num_attention_heads  # type: ignore[union-attr]
        for found in modules(model, "o_proj"):
            wrap_forward(
                found.module, lambda original, x: original(x.unflatten(-1, (heads, -1)).transpose(-1, -2).flatten(-2))
            )


class AnotherLayersWeights(BugOperator):
    """Layer 1 holds layer 2's down_proj."""

    name, family = "a layer's weights in another", "llama"
    component, causes = ("down_proj",), ("wrong layer's weights",)

    def inject(self, model: nn.Module) -> None:
        """One projection."""
        layers: Any = model.model.layers  # type: ignore[union-attr]
        layers[1].mlp.down_proj.weight.data = layers[2].mlp.down_proj.weight.data.clone()


class LayersOffByOne(BugOperator):
    """Every layer computes with the weights of the layer before it."""

    name, family = "layers shifted by one", "qwen2"
    component, causes = ("layers", "_proj", "norm"), ("wrong layer's weights",)

    def inject(self, model: nn.Module) -> None:
        """All weights of the MLPs; at run time, the parameters stay as they were loaded."""
        layers: Any = model.model.layers  # type: ignore[union-attr]
        kept = [layer.mlp.up_proj.weight.data for layer in layers]
        for number, layer in enumerate(layers):
            _reweighted(layer.mlp.up_proj, kept[number - 1])


class ScaledShard(BugOperator):
    """A sum over ranks is an average: the MLP's output is halved."""

    name, family = "sum over ranks averaged", "qwen3"
    component, causes = ("down_proj",), ("scale or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "down_proj"):
            edit_output(found.module, lambda out: out * 0.5)


class BiasAddedSeparately(BugOperator):
    """The bias is added after the product, as sharded layers do."""

    name, family, control = "control: bias added separately", "llama biases", True

    def inject(self, model: nn.Module) -> None:
        """All projections."""
        for found in modules(model, "_proj"):
            linear = found.module

            def apart(original: Any, x: Tensor, linear: Any = linear) -> Tensor:
                product = F.linear(x, linear.weight)
                return product if linear.bias is None else product + linear.bias

            wrap_forward(linear, apart)


class ReductionSplit(BugOperator):
    """o_proj and down_proj sum two halves, as two ranks do."""

    name, family, control = "control: reductions split in two", "llama", True
    split = ("o_proj", "down_proj")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, *self.split):
            linear = found.module

            def halves(original: object, x: Tensor, linear: Any = linear) -> Tensor:
                parts = zip(x.chunk(2, -1), linear.weight.chunk(2, 1), strict=True)
                first, second = (F.linear(inputs, columns) for inputs, columns in parts)
                return first + second

            wrap_forward(linear, halves)
