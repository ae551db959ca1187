"""Bugs in ports that the recipes generate: edits of their text."""

from __future__ import annotations

from equiport.bench.portbugs.operator import PortBug, replaced


class PortUnchanged(PortBug):
    """The port as generated."""

    name, family, control = "control: port unchanged", "gemma2", True

    def edit(self, source: str) -> str:
        """Nothing."""
        return source


class PortNormOffset(PortBug):
    """w for 1 + w."""

    name, family = "port: norm offset dropped", "gemma2"
    component, causes = ("norm",), ("norm offset",)

    def edit(self, source: str) -> str:
        """In the norm's class."""
        return replaced(source, "(1.0 + self.weight.float())", "self.weight.float()")


class PortSoftcapInDecode(PortBug):
    """The new token's score is not capped in decode."""

    name, family = "port: softcap missing in decode", "gemma2"
    component, causes = ("self_attn",), ("softcap",)

    def edit(self, source: str) -> str:
        """In the decode path alone."""
        return replaced(
            source,
            "active = self.capped_scores(Q, keys).float()",
            "active = (torch.matmul(Q, keys.transpose(2, 3)) / self.softmax_scale).float()",
        )


class PortWindow(PortBug):
    """The window is one token too long."""

    name, family = "port: window one too long", "qwen2 windows"
    component, causes = ("self_attn",), ("window",)

    def edit(self, source: str) -> str:
        """In the mask."""
        return replaced(source, "keys > queries - window", "keys >= queries - window")


class PortWindowLayers(PortBug):
    """Local and global layers are taken for one another."""

    name, family = "port: window on the wrong layers", "gemma3"
    component, causes = ("self_attn",), ("window",)

    def edit(self, source: str) -> str:
        """In the attention's constructor."""
        return replaced(
            source,
            'self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention"',
            'self.window = config.sliding_window if config.layer_types[layer_idx] != "sliding_attention"',
        )


class PortHeadNorms(PortBug):
    """The queries' norm holds the keys' weight."""

    name, family = "port: q and k norms exchanged", "qwen3"
    component, causes = ("norm", "self_attn"), ("wrong layer's weights",)

    def edit(self, source: str) -> str:
        """In the conversion."""
        text = replaced(source, "self_attn.q_norm.", "self_attn.x_norm.")
        text = replaced(text, "self_attn.k_norm.", "self_attn.q_norm.")
        return replaced(text, "self_attn.x_norm.", "self_attn.k_norm.")


class PortScaleInverted(PortBug):
    """The base class divides by softmax_scale, HF's number multiplies."""

    name, family = "port: softmax scale taken for a divisor", "granite"
    component, causes = ("self_attn",), ("softmax scale",)

    def edit(self, source: str) -> str:
        """In the attention's constructor."""
        return replaced(
            source, "softmax_scale=1.0 / config.attention_multiplier", "softmax_scale=config.attention_multiplier"
        )


class PortResidual(PortBug):
    """The attention's branch is not multiplied."""

    name, family = "port: residual multiplier dropped", "granite"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def edit(self, source: str) -> str:
        """In the layer."""
        return replaced(source, "attention.hidden_states * self.residual_multiplier", "attention.hidden_states")


class PortLogits(PortBug):
    """Logits are not divided."""

    name, family = "port: logits scaling dropped", "granite"
    component, causes = ("logits", "lm_head"), ("scale or multiplier",)

    def edit(self, source: str) -> str:
        """In the head."""
        return replaced(source, "logits = logits / self.logits_scaling", "logits = logits * 1.0")


class PortKeysNotNormed(PortBug):
    """Keys are not normed."""

    name, family = "port: keys not normed", "olmo2"
    component, causes = ("self_attn", "k_norm"), ("qk-norm", "norm kind")

    def edit(self, source: str) -> str:
        """In the attention."""
        return replaced(source, "move_heads_front(self.k_norm(K), batch", "move_heads_front(K, batch")


class PortEveryLayerRotates(PortBug):
    """Layers without positions are rotated."""

    name, family = "port: rotation on NoPE layers", "smollm3"
    component, causes = ("self_attn",), ("NoPE layers",)

    def edit(self, source: str) -> str:
        """In the attention's constructor."""
        return replaced(
            source,
            "make_rotary_embedding(config) if config.no_rope_layers[layer_idx] else None",
            "make_rotary_embedding(config)",
        )


class PortRotationStyle(PortBug):
    """Halves for pairs."""

    name, family = "port: rotation in halves for pairs", "glm4"
    component, causes = ("self_attn",), ("rotation style",)

    def edit(self, source: str) -> str:
        """In the rotation."""
        return replaced(
            source,
            "torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)",
            "torch.cat((-turning[..., rotary_dim // 2 :], turning[..., : rotary_dim // 2]), dim=-1)",
        )


class PortGateUp(PortBug):
    """The fused projection is split as up, gate."""

    name, family = "port: up taken for gate", "phi3"
    component, causes = ("mlp",), ("gate/up order",)

    def edit(self, source: str) -> str:
        """In the MLP."""
        return replaced(source, "gate, up = self.gate_up_proj", "up, gate = self.gate_up_proj")


class PortLlama3(PortBug):
    """llama3 scaling is not applied."""

    name, family = "port: llama3 scaling ignored", "llama llama3"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def edit(self, source: str) -> str:
        """In the frequencies."""
        return replaced(source, "return blend * plain + (1.0 - blend) * plain / self.stretch", "return plain")


class PortYarn(PortBug):
    """yarn's ramp is left out."""

    name, family = "port: yarn ramp ignored", "llama yarn"
    component, causes = ("rotary_emb",), ("rope scaling or base",)

    def edit(self, source: str) -> str:
        """In the frequencies."""
        return replaced(source, "return plain / self.stretch * ramp + plain * (1 - ramp)", "return plain")


class PortFusedQkv(PortBug):
    """A query_key_value of per-head blocks is split into thirds."""

    name, family = "port: fused qkv split as thirds", "gpt_neox"
    component, causes = (
        ("self_attn", "attention", "qkv", "_proj"),
        ("fused layout or head order", "wrong layer's weights"),
    )

    def edit(self, source: str) -> str:
        """In the conversion."""
        return replaced(source, "parts = [part.flatten(0, 1) for part in heads.unbind(1)]", "parts = fused.chunk(3)")


class PortSequential(PortBug):
    """The MLP reads the sum with attention."""

    name, family = "port: serial branches for parallel", "gpt_neox"
    component, causes = ("layers.{i}",), ("residual layout or multiplier",)

    def edit(self, source: str) -> str:
        """In the layer."""
        return replaced(
            source,
            "self.mlp(self.post_attention_layernorm(hidden_states))",
            "self.mlp(self.post_attention_layernorm(hidden_states + attention.hidden_states))",
        )


class PortDecodePosition(PortBug):
    """Positions in decode are one too high."""

    name, family, quick = "port: position + 1 in decode", "llama", True
    component, causes = ("self_attn",), ("position offset",)

    def edit(self, source: str) -> str:
        """In the layer."""
        return replaced(
            source,
            "        attention = self.self_attn(",
            "        if past_key_value is not None:\n            position_ids = position_ids + 1\n"
            "        attention = self.self_attn(",
        )


class PortNotTied(PortBug):
    """The tied head is not filled."""

    name, family = "port: tied head not filled", "llama tied, head_dim"
    component, causes = ("lm_head",), ()

    def edit(self, source: str) -> str:
        """In the conversion."""
        return replaced(source, 'state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()', "pass")


class PortBf16Norm(PortBug):
    """The norm is computed in the input's precision."""

    name, family = "port: norm in bf16", "gemma2"
    component, causes = ("norm",), ("precision order",)

    def edit(self, source: str) -> str:
        """In the norm's class."""
        return replaced(source, "wide = x.float()", "wide = x")
