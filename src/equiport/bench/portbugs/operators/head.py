"""Bugs at both ends: embedding, multipliers, head, caps, tie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import BugOperator, edit_output, modules, wrap_forward

_LOGITS = ("logits", "lm_head", "head")


def _on_logits(model: nn.Module, edit: Any) -> None:
    def wrapper(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = edit(out.logits)
        return out

    wrap_forward(model, wrapper)


class LogitsScalingDropped(BugOperator):
    """logits_scaling is not read."""

    name, family = "logits_scaling dropped", "granite"
    component, causes = _LOGITS, ("scale or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """Logits are not divided."""
        scaling: Any = model.config.logits_scaling  # type: ignore[union-attr]
        _on_logits(model, lambda logits: logits * scaling)


class LogitsScalingInverted(BugOperator):
    """logits_scaling multiplies where it divides."""

    name, family = "logits_scaling inverted", "granite"
    component, causes = _LOGITS, ("scale or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """Logits are multiplied."""
        scaling: Any = model.config.logits_scaling  # type: ignore[union-attr]
        _on_logits(model, lambda logits: logits * scaling**2)


class LogitScaleDropped(BugOperator):
    """logit_scale is not read."""

    name, family = "logit_scale dropped", "cohere2"
    component, causes = _LOGITS, ("scale or multiplier",)

    def inject(self, model: nn.Module) -> None:
        """Logits are not multiplied."""
        model.logit_scale = 1.0  # type: ignore[assignment]


class FinalCapDropped(BugOperator):
    """Logits are not capped."""

    name, family = "final softcap dropped", "gemma2"
    component, causes = _LOGITS, ("softcap",)

    def inject(self, model: nn.Module) -> None:
        """The target's own config."""
        model.config.final_logit_softcapping = None  # type: ignore[union-attr]


class FinalCapTwice(BugOperator):
    """Logits are capped by the model and by its wrapper."""

    name, family = "final softcap twice", "gemma2"
    component, causes = _LOGITS, ("softcap",)

    def inject(self, model: nn.Module) -> None:
        """Capped again."""
        cap: Any = model.config.final_logit_softcapping  # type: ignore[union-attr]
        _on_logits(model, lambda logits: cap * torch.tanh(logits / cap))


class EmbeddingScaleDropped(BugOperator):
    """Embeddings are not multiplied by the root of the width."""

    name, family = "embedding multiplier dropped", "gemma3"
    component, causes = ("embed_tokens",), ("embedding multiplier",)

    def inject(self, model: nn.Module) -> None:
        """The embedding."""
        for found in modules(model, "embed_tokens"):
            own = found.module
            wrap_forward(own, lambda original, ids, own=own: F.embedding(ids, own.weight))


class EmbeddingScaleRounded(BugOperator):
    """The root of the width is rounded to bf16 in every dtype."""

    name, family = "embedding multiplier rounded", "gemma3"
    component, causes = ("embed_tokens",), ("embedding multiplier",)

    def inject(self, model: nn.Module) -> None:
        """The embedding."""
        for found in modules(model, "embed_tokens"):
            own = found.module
            scale = torch.tensor(own.embedding_dim**0.5).to(torch.bfloat16)

            def rounded(original: Any, ids: Tensor, own: Any = own, scale: Tensor = scale) -> Tensor:
                return F.embedding(ids, own.weight) * scale.to(own.weight.dtype)

            wrap_forward(own, rounded)


class GraniteEmbedding(BugOperator):
    """embedding_multiplier is not read."""

    name, family = "embedding_multiplier dropped", "granite"
    component = ("embedding_multiplier", "embed_tokens", "embeddings")
    causes = ("embedding multiplier", "config key not read", "scale or multiplier")

    def inject(self, model: nn.Module) -> None:
        """The inner model."""
        model.model.embedding_multiplier = 1.0  # type: ignore[union-attr,assignment]


class RowsShifted(BugOperator):
    """Rows of neighbouring tokens are looked up."""

    name, family = "token ids shifted", "qwen2"
    component, causes = ("embed_tokens",), ("token ids shifted",)

    def inject(self, model: nn.Module) -> None:
        """The embedding."""
        for found in modules(model, "embed_tokens"):
            own = found.module
            wrap_forward(own, lambda original, ids, own=own: original((ids + 1) % own.num_embeddings))


class HeadBiasDropped(BugOperator):
    """lm_head adds no bias."""

    name, family = "lm_head bias dropped", "phi"
    component, causes = ("lm_head",), ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """The head."""
        for found in modules(model, "lm_head"):
            own = found.module
            wrap_forward(own, lambda original, x, own=own: F.linear(x, own.weight))


class WronglyTied(BugOperator):
    """The head uses the embedding's weight though the model is not tied."""

    name, family = "head tied though it is not", "llama"
    component, causes = ("lm_head",), ("tie",)

    def inject(self, model: nn.Module) -> None:
        """The head, at run time."""
        other: Any = model.model
        for found in modules(model, "lm_head"):
            wrap_forward(found.module, lambda original, x: F.linear(x, other.embed_tokens.weight))


class NotTied(BugOperator):
    """A tied head keeps random weights."""

    name, family = "tied head left random", "qwen2"
    component, causes = ("lm_head",), ()

    def inject(self, model: nn.Module) -> None:
        """The head gets a parameter of its own."""
        head: Any = model.lm_head
        random = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)) * 0.02
        head.weight = nn.Parameter(random.to(head.weight.dtype), requires_grad=False)


class LastTokenOfPadded(BugOperator):
    """The head reads the position before the last."""

    name, family = "head reads the token before", "mistral"
    component, causes = (*_LOGITS, "norm", "model"), ("wrong token",)

    def inject(self, model: nn.Module) -> None:
        """Hidden states are moved by one in prefill."""

        def moved(x: Tensor) -> Tensor:
            return torch.cat((x[:, :1], x[:, :-1]), 1)

        for found in modules(model, "lm_head"):
            wrap_forward(found.module, lambda original, x: original(moved(x) if x.shape[1] > 1 else x))


class HeadInWide(BugOperator):
    """The head's product in fp32."""

    name, family, control = "control: head in fp32", "olmo2", True

    def inject(self, model: nn.Module) -> None:
        """The head."""
        for found in modules(model, "lm_head"):
            own = found.module
            wrap_forward(own, lambda original, x, own=own: F.linear(x.float(), own.weight.float()).to(x.dtype))


class CapWritten(BugOperator):
    """The cap on the logits in fp32."""

    name, family, control = "control: unchanged with caps and windows", "gemma3", True

    def inject(self, model: nn.Module) -> None:
        """Nothing."""
        edit_output(next(modules(model, "model.norm")).module, lambda out: out.clone())
