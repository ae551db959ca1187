"""Bugs in rotary embeddings and positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equiport.bench.portbugs.operator import BugOperator, attentions, modules, rotate, wrap_forward


def _plain(width: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, width, 2) / width)


def _frequencies(model: nn.Module, made: Callable[[Tensor], Tensor], name: str = "inv_freq") -> None:
    for found in modules(model, "rotary_emb"):
        setattr(found.module, name, made(getattr(found.module, name)))


def _tables(model: nn.Module, edit: Callable[[Any, Tensor, Tensor], Any]) -> None:
    """`edit(original, x, positions)` makes cos and sin."""
    for found in modules(model, "rotary_emb"):
        wrap_forward(found.module, lambda original, x, position_ids, *a: edit(original, x, position_ids))


class Interleaved(BugOperator):
    """Neighbours are paired where the source pairs halves."""

    name, family, quick = "rotation in pairs for halves", "llama", True
    component, causes = ("self_attn",), ("rotation style",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def pairs(original: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            half = cos.shape[-1] // 2
            c, s = (t[:, None, :, :half] for t in (cos, sin))

            def turned(x: Tensor) -> Tensor:
                even, odd = x[..., ::2], x[..., 1::2]
                return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)

            return turned(q), turned(k)

        for attention in attentions(model):
            rotate(attention, pairs)


class Halves(BugOperator):
    """Halves are paired where the source pairs neighbours."""

    name, family = "rotation in halves for pairs", "cohere2"
    component, causes = ("self_attn",), ("rotation style",)

    def inject(self, model: nn.Module) -> None:
        """All layers that rotate."""

        def halves(original: object, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            c, s = (t[:, None, :, ::2] for t in (cos, sin))

            def turned(x: Tensor) -> Tensor:
                left, right = x.chunk(2, -1)
                return torch.cat((left * c - right * s, right * c + left * s), -1).to(x.dtype)

            return turned(q), turned(k)

        for attention in attentions(model):
            rotate(attention, halves)


class LatentHalves(BugOperator):
    """The rotary part of latent attention is turned in halves without the interleaving undone."""

    name, family = "MLA rotation in halves", "deepseek_v3"
    component, causes = ("self_attn",), ("rotation style",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.config.rope_interleave = False


class OtherDirection(BugOperator):
    """Angles are negated."""

    name, family = "rotation the other way", "qwen3"
    component, causes = ("self_attn", "rotary_emb"), ("rotation style", "rope scaling or base")

    def inject(self, model: nn.Module) -> None:
        """All layers, on a part of the pair: keys alone, so that the angle between q and k is off."""

        def back(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return original(q, k, cos, -sin)

        for attention in attentions(model):
            rotate(attention, back)


class QueriesAlone(BugOperator):
    """Keys go into the cache unrotated."""

    name, family = "queries alone rotated", "qwen2"
    component, causes = ("self_attn",), ("rotation style",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            rotate(attention, lambda original, q, k, cos, sin: (original(q, k, cos, sin)[0], k))


class WholeHead(BugOperator):
    """The whole head is rotated where the source turns a quarter."""

    name, family = "partial rotary ignored", "stablelm"
    component, causes = ("self_attn",), ("partial rotary",)

    def inject(self, model: nn.Module) -> None:
        """All layers: the tables are those of the whole width."""
        for attention in attentions(model):
            width = attention.head_dim
            frequencies = _plain(width, 1e4)

            def forward(
                original: Any, *args: Any, a: Any = attention, w: int = width, f: Tensor = frequencies, **kwargs: Any
            ) -> Any:
                cos, _ = kwargs["position_embeddings"]
                angles = kwargs["position_ids"][..., None].float() * f
                wide = torch.cat((angles, angles), -1)
                tables = wide.cos().to(cos.dtype), wide.sin().to(cos.dtype)
                return original(*args, **{**kwargs, "position_embeddings": tables})

            attention.rotary_ndims = width
            wrap_forward(attention, forward)


class LastChannels(BugOperator):
    """The last channels are rotated instead of the first."""

    name, family = "last channels rotated", "glm4"
    component, causes = ("self_attn",), ("partial rotary",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def last(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            width = q.shape[-1] // 2
            q, k = original(q.roll(width, -1), k.roll(width, -1), cos, sin)
            return q.roll(-width, -1), k.roll(-width, -1)

        for attention in attentions(model):
            rotate(attention, last)


class Llama3Dropped(BugOperator):
    """rope_scaling of type llama3 is not read."""

    name, family = "llama3 scaling dropped", "llama llama3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The plain frequencies."""
        _frequencies(model, lambda own: _plain(2 * len(own), 1e4))


class Llama3WithoutRamp(BugOperator):
    """llama3 scaling without the smooth part: all long waves are divided."""

    name, family = "llama3 scaling without its ramp", "qwen3 llama3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """Divided where the wave is longer than the original context, kept elsewhere."""

        def stepped(own: Tensor) -> Tensor:
            plain = _plain(2 * len(own), 1e6)
            return torch.where(2 * torch.pi / plain > 16, plain / 8, plain)

        _frequencies(model, stepped)


class LinearDropped(BugOperator):
    """rope_scaling of type linear is not read."""

    name, family = "linear scaling dropped", "llama linear"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The plain frequencies."""
        _frequencies(model, lambda own: _plain(2 * len(own), 1e4))


class YarnAsLinear(BugOperator):
    """yarn is computed as linear scaling."""

    name, family = "yarn taken for linear", "llama yarn"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """All frequencies divided by the factor; cos and sin keep theirs."""
        _frequencies(model, lambda own: _plain(2 * len(own), 1e4) / 4)


class YarnFactorDropped(BugOperator):
    """cos and sin are not multiplied by yarn's attention factor."""

    name, family = "yarn attention factor dropped", "llama yarn"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The tables' amplitude."""
        for found in modules(model, "rotary_emb"):
            found.module.attention_scaling = 1.0


class YarnTruncated(BugOperator):
    """The bounds of yarn's ramp are rounded where the config says truncate: false."""

    name, family = "yarn truncate ignored", "gpt_oss"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """Frequencies with rounded bounds."""

        def truncated(own: Tensor) -> Tensor:
            width = 2 * len(own)
            plain = _plain(width, 1e4)

            def bound(turns: float) -> float:
                return float(width * math.log(16 / (turns * 2 * math.pi)) / (2 * math.log(1e4)))

            low, high = max(int(bound(32) // 1), 0), min(-int(-bound(1) // 1), width - 1)
            ramp = ((torch.arange(len(own)) - low) / max(high - low, 1e-3)).clamp(0, 1)
            return plain / 4 * ramp + plain * (1 - ramp)

        _frequencies(model, truncated)


class LongropeShort(BugOperator):
    """The short factors are used beyond the original context."""

    name, family = "longrope short for long", "phi3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The tables."""
        short = torch.tensor(model.config.rope_parameters["short_factor"])  # type: ignore[union-attr,index]
        frequencies = _plain(2 * len(short), 1e4) / short

        def made(original: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, _ = original(x, positions)
            scale = modules_scale(model)
            angles = positions[..., None].float() * frequencies
            wide = torch.cat((angles, angles), -1)
            return (wide.cos() * scale).to(cos.dtype), (wide.sin() * scale).to(cos.dtype)

        _tables(model, made)


def modules_scale(model: nn.Module) -> float:
    """The amplitude of the model's tables."""
    return float(next(modules(model, "rotary_emb")).module.attention_scaling)


class LongropeFactorDropped(BugOperator):
    """cos and sin are not multiplied by longrope's attention factor."""

    name, family = "longrope attention factor dropped", "phi3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The tables' amplitude."""
        for found in modules(model, "rotary_emb"):
            found.module.attention_scaling = 1.0


class DefaultTheta(BugOperator):
    """rope_theta is not read: the base is 10000."""

    name, family = "rope_theta ignored", "smollm3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The frequencies."""
        _frequencies(model, lambda own: _plain(2 * len(own), 1e4))


class OneThetaForAll(BugOperator):
    """Local layers use the global base."""

    name, family = "one base for local and global layers", "gemma3"
    component, causes = ("rotary_emb", "self_attn"), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """The local frequencies."""
        _frequencies(model, lambda own: _plain(2 * len(own), 1e6), "sliding_attention_inv_freq")


class HeadDimDerived(BugOperator):
    """Frequencies are made for hidden/heads where the config names head_dim."""

    name, family = "frequencies of hidden/heads", "llama tied, head_dim"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def inject(self, model: nn.Module) -> None:
        """Exponents over another width."""
        config: Any = model.config
        width = config.hidden_size // config.num_attention_heads
        _frequencies(model, lambda own: 1e4 ** -(torch.arange(0, 2 * len(own), 2) / width))


class LowAngles(BugOperator):
    """Positions times frequencies in bf16."""

    name, family = "angles in bf16", "mistral"
    component, causes = ("rotary_emb",), ("precision order",)

    def inject(self, model: nn.Module) -> None:
        """The tables, in fp32 runs too."""

        def low(original: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            frequencies = next(modules(model, "rotary_emb")).module.inv_freq
            angles = positions[..., None].to(torch.bfloat16) * frequencies.to(torch.bfloat16)
            wide = torch.cat((angles, angles), -1).float()
            return wide.cos().to(x.dtype), wide.sin().to(x.dtype)

        _tables(model, low)


class WideTables(BugOperator):
    """cos and sin stay in fp32 and the rotation is done there."""

    name, family, control = "control: rotation in fp32", "qwen2", True

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def wide(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            turned = original(q.float(), k.float(), cos.float(), sin.float())
            return turned[0].to(q.dtype), turned[1].to(k.dtype)

        for attention in attentions(model):
            rotate(attention, wide)


class PairsUndone(BugOperator):
    """Pairs are gathered into halves, rotated there, and laid out in halves for q and k alike."""

    name, family, control = "control: pairs rotated as halves", "cohere2", True

    def inject(self, model: nn.Module) -> None:
        """All layers that rotate: scores do not change when q and k are permuted alike."""

        def gathered(original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            c, s = (t[:, None, :, ::2] for t in (cos, sin))

            def turned(x: Tensor) -> Tensor:
                even, odd = x[..., ::2].float(), x[..., 1::2].float()
                return torch.cat((even * c - odd * s, odd * c + even * s), -1).to(x.dtype)

            return turned(q), turned(k)

        for attention in attentions(model):
            rotate(attention, gathered)
