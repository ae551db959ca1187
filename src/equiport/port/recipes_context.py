"""What recipes may ask of a fingerprint: names, and the config expressions that its values come from.

A port reads its config as the source does, so that it serves every checkpoint of the architecture and its tiny
fixtures; a value that stands in no config key is written out.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from equiport.errors import EquiportError, OpenQuestionError
from equiport.port.fingerprint import ConfigKey, Fingerprint, NormFacets, RopeFacets
from equiport.port.plan_substitution import norm_block

_PREFIX = re.compile(r"\^(\w+)\\\.")
_EPS = re.compile(r"eps(ilon)?$")
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")
_ATTENTION_BIASES = ("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias")
_OUTPUT_BIASES = ("attention_out_bias", "attention_bias", "use_bias")
_MLP_BIASES = ("mlp_bias", "use_bias")


@dataclass(frozen=True)
class RecipeContext:
    """The names that templates use. `f` is the fingerprint; methods give Python expressions as text.

    `own_norms`: norm blocks that no recipe made -> the class that takes their place.
    """

    f: Fingerprint
    blocks: frozenset[str]
    own_norms: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """Everything that a template or a condition can name."""
        methods = (
            "key", "norm", "eps", "activation", "attention_bias", "output_bias", "mlp_bias", "layer_test",
            "softmax_divisor", "final_norm", "qk_norm", "number", "stored_prefixes",
        )  # fmt: skip
        return {
            "f": self.f,
            "attention": self.f.attention,
            "mlp": self.f.mlp,
            "blocks": self.blocks,
            "stem": self.stem,
            "model_type": self.f.model_type,
            "causal_class": self.f.architecture,
            "per_layer": self.per_layer,
            "mixed_windows": self.mixed_windows,
            "dual_rope": len(self.f.ropes) > 1,
            "fp32_tables": self.fp32_tables,
            "own_rotation": self.own_rotation,
            "window_test": self._flags("window"),
            "rope_test": self._flags("rope"),
            "global_rope": self._rope(windowed=False),
            "local_rope": self._rope(windowed=True),
            "local_rope_test": self.local_rope_test,
            "rotary_base": "Float32RotaryEmbedding" if self.fp32_tables else "RotaryEmbedding",
            "rotary_dim": self.rotary_dim,
            "residual_factor": "multipliers.residual" in self.blocks,
            "logits_factor": self.logits_factor(),
            "embedding_scale": self.embedding_scale(),
            "scaled_embedding_class": "multipliers.embedding" in self.blocks and self.scaled_embedding_class,
            "scaled_embedding": "multipliers.embedding" in self.blocks and not self.scaled_embedding_class,
            "own_head": bool({"multipliers.logits", "head.softcap"} & self.blocks),
            "norm_imports": self.norm_imports(),
            "reads_kv_heads": any(found.name == "num_key_value_heads" for found in self.f.config_keys),
            "backbone_prefix": f"{self.f.names.backbone}.",
            **{name: getattr(self, name) for name in methods},
        }

    @property
    def stem(self) -> str:
        """`Llama` for LlamaForCausalLM: the middle of every class name of the port."""
        return re.sub(r"(ForCausalLM|LMHeadModel)$", "", self.f.architecture)

    @property
    def mixed_windows(self) -> bool:
        """Some layers see a window and others do not."""
        return len({layer.window for layer in self.f.layers}) > 1

    @property
    def per_layer(self) -> bool:
        """Attention layers differ, so that they are built with their number."""
        return self.mixed_windows or len({layer.rope for layer in self.f.layers}) > 1

    @property
    def fp32_tables(self) -> bool:
        """The source rotates in fp32: its rotary module does not cast cos and sin to the activations' dtype."""
        classes = {rope.cls for rope in self.f.ropes}
        return bool(classes) and all(_returns_uncast(self.f.source_file, name) for name in classes)

    @property
    def own_rotation(self) -> bool:
        """The base class's rotation of whole heads by halves, in the activations' dtype, is not the source's."""
        return bool({"rope.partial", "rope.interleaved"} & self.blocks) or self.fp32_tables

    @property
    def scaled_embedding_class(self) -> bool:
        """The source's embedding class multiplies by itself, rather than the model after it."""
        return any(block.role == "embedding" and block.cls != "Embedding" for block in self.f.blocks)

    @property
    def rotary_dim(self) -> str:
        """How many channels of a head turn."""
        partial = "rope.partial" in self.blocks
        return "int(config.head_dim * config.partial_rotary_factor)" if partial else "config.head_dim"

    @property
    def local_rope_test(self) -> str:
        """True for the layers that rotate with the local base."""
        if len(self.f.ropes) < 2:
            return ""
        local = self._rope(windowed=True)
        return self.layer_test([local is not None and layer.rope == local.name for layer in self.f.layers])

    def embedding_scale(self) -> str:
        """The factor on the token embeddings."""
        factor, source = self.f.multipliers.embedding, self.f.multipliers.embedding_source
        if math.isclose(factor, self.f.hidden_size**0.5, rel_tol=1e-6):
            return "config.hidden_size**0.5"
        return self.key(factor, [source])

    def logits_factor(self) -> tuple[str, str, str] | None:
        """(attribute, operator, expression) of the factor on the logits; None without one."""
        factor, source = self.f.multipliers.logits, self.f.multipliers.logits_source
        if "multipliers.logits" not in self.blocks:
            return None
        for found in self._keys_named_in(source):
            if math.isclose(found.value, factor, rel_tol=1e-6):
                return found.name, "*", f"config.{found.name}"
            if math.isclose(1.0 / found.value, factor, rel_tol=1e-6):
                return found.name, "/", f"config.{found.name}"
        return "logits_factor", "*", repr(factor)

    def key(self, value: Any, names: Iterable[str] | str) -> str:
        """`config.<name>` of the first of `names` that is read by the source and holds `value`; else the value."""
        for name in [names] if isinstance(names, str) else names:
            if any(found.name == name and _same(found.value, value) for found in self.f.config_keys):
                return f"config.{name}"
        return self.number(value)

    @staticmethod
    def number(value: Any) -> str:
        """A literal."""
        return repr(value)

    def eps(self, norm: NormFacets) -> str:
        """Where a norm's epsilon comes from."""
        return self.key(norm.eps, [found.name for found in self.f.config_keys if _EPS.search(found.name)])

    def norm(self, path: str, width: str = "config.hidden_size") -> str:
        """The constructor call of the norm at a layer attribute's name or module path."""
        facets = self.f.norm_at(path)
        if facets is None:
            raise EquiportError(f"the fingerprint has no norm at {path!r}", field="norms")
        return self._norm_call(facets, width)

    def final_norm(self) -> str:
        """The constructor call of the norm before the head."""
        return self.norm(self.f.names.final_norm)

    def qk_norm(self, width: str) -> str:
        """The constructor call of the norm on queries or keys."""
        assert self.f.attention is not None and self.f.attention.qk_norm is not None
        return self._norm_call(self.f.attention.qk_norm.norm, width)

    def _norm_call(self, facets: NormFacets, width: str) -> str:
        eps = self.eps(facets)
        if norm_block(facets) in self.own_norms:
            return f"{self.own_norms[norm_block(facets)]}({width}, eps={eps})"
        if facets.kind == "layernorm":
            options = "" if facets.has_bias else ", bias=False"
            options += "" if facets.has_weight else ", elementwise_affine=False"
            return f"nn.LayerNorm({width}, eps={eps}{options})"
        if facets.weight_offset:
            return f"{self.stem}RMSNorm({width}, eps={eps})"
        return f"make_rmsnorm({width}, eps={eps})"

    def norm_imports(self) -> tuple[tuple[str, str], ...]:
        """(module, class) of the source's plain RMSNorm classes: they are what runs on a CPU."""
        found = []
        for norm in self._all_norms():
            if norm.kind == "rmsnorm" and not norm.weight_offset:
                found.append((_module(self._file_of(norm.cls)), norm.cls))
        return tuple(dict.fromkeys(found))

    def _all_norms(self) -> tuple[NormFacets, ...]:
        extra = self.f.attention.qk_norm if self.f.attention else None
        return (*self.f.norms, *((extra.norm,) if extra else ()))

    def _file_of(self, cls: str) -> str:
        return next((block.file for block in self.f.blocks if block.cls == cls), self.f.source_file)

    def activation(self) -> str:
        """The key of ACT2FN."""
        assert self.f.mlp is not None
        return self.key(self.f.mlp.activation, _ACTIVATIONS)

    def attention_bias(self) -> str:
        """Whether q, k and v have biases."""
        return self.key(bool(self.f.attention and self.f.attention.q_bias), _ATTENTION_BIASES)

    def output_bias(self) -> str:
        """Whether o has a bias."""
        return self.key(bool(self.f.attention and self.f.attention.o_bias), _OUTPUT_BIASES)

    def mlp_bias(self, value: bool) -> str:
        """Whether the feed-forward projections have biases."""
        return self.key(value, _MLP_BIASES)

    def softmax_divisor(self) -> str:
        """What the base class divides the scores by: the inverse of the source's scale."""
        assert self.f.attention is not None and self.f.attention.scale is not None
        scale, source = self.f.attention.scale, self.f.attention.scale_source
        for found in self._keys_named_in(source):
            if math.isclose(found.value, scale, rel_tol=1e-6):
                return f"1.0 / config.{found.name}"
            if math.isclose(found.value**-0.5, scale, rel_tol=1e-6):
                return f"math.sqrt(config.{found.name})"
        return repr(1.0 / scale)

    def _keys_named_in(self, source: str) -> list[ConfigKey]:
        """The numeric config keys that an expression such as `1 / logits_scaling` names."""
        words = set(re.findall(r"\w+", source))
        numbers = [found for found in self.f.config_keys if found.name in words]
        return [found for found in numbers if isinstance(found.value, (int, float)) and found.value]

    def stored_prefixes(self) -> tuple[tuple[str, str], ...]:
        """(stored, loaded) prefixes of tensors that transformers itself renames when it loads this architecture."""
        try:
            from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        except ImportError:
            return ()
        found = []
        known = get_checkpoint_conversion_mapping(self.f.architecture)
        for item in known or get_checkpoint_conversion_mapping(self.f.model_type) or []:
            sources, targets = (
                _listed(getattr(item, "source_patterns", ())),
                _listed(getattr(item, "target_patterns", ())),
            )
            if len(sources) == len(targets) == 1 and (match := _PREFIX.fullmatch(sources[0])):
                found.append((match[1] + ".", targets[0]))
        return tuple(found)

    def _flags(self, field: str) -> str:
        """The config expression that is true for the layers where `field` (window or rope) acts."""
        flags = [bool(getattr(layer, field)) for layer in self.f.layers]
        return self.layer_test(flags) if len(set(flags)) > 1 else ""

    def layer_test(self, flags: Sequence[bool]) -> str:
        """An expression over `config` and `layer_idx` that is true for the flagged layers.

        Raises:
            OpenQuestionError: no list in the config tells these layers apart.
        """
        for found in self.f.config_keys:
            values = found.value
            if not isinstance(values, (list, tuple)) or len(values) != len(flags):
                continue
            if all(bool(value) == flag for value, flag in zip(values, flags, strict=True)):
                return f"config.{found.name}[layer_idx]"
            for word in dict.fromkeys(value for value in values if isinstance(value, str)):
                if all((value == word) == flag for value, flag in zip(values, flags, strict=True)):
                    return f'config.{found.name}[layer_idx] == "{word}"'
        layers = [index for index, flag in enumerate(flags) if flag]
        raise OpenQuestionError(
            f"no list in the config tells layers {layers} from the others",
            where="config.json",
            remedy="Such a port needs a translation by hand or by an agent.",
        )

    def _rope(self, *, windowed: bool) -> RopeFacets | None:
        """The tables of the layers with a window, or of those without; the only ones where there are no others."""
        ropes = self.f.ropes
        if len(ropes) == 1:
            return ropes[0]
        used = {layer.rope for layer in self.f.layers if layer.rope and bool(layer.window) is windowed}
        found = [rope for rope in ropes if rope.name in used]
        return found[0] if len(found) == 1 else None


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)


def _listed(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _module(file: str) -> str:
    return ".".join(PurePosixPath(file).with_suffix("").parts)


def _returns_uncast(source_file: str, cls: str) -> bool:
    """Whether the class's forward returns its tables as they are, without `.to(dtype=...)`."""
    import importlib.util

    spec = importlib.util.find_spec(_module(source_file))
    if spec is None or spec.origin is None:
        return False
    with open(spec.origin, encoding="utf-8") as stream:
        tree = ast.parse(stream.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    returns = [item for item in ast.walk(method) if isinstance(item, ast.Return) and item.value]
                    return bool(returns) and not any(".to(" in ast.unparse(item) for item in returns)
    return False
