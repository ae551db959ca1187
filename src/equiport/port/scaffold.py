"""Scaffold: the units' definitions, in one modeling file with configs, model, application and weight conversion.

The skeletons are in `templates/scaffold/<stack>/`. Units may come from recipes or from anywhere else: what is taken
from a unit are its top-level definitions, each name once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.port import made_unit
from equiport.port.fingerprint import Fingerprint
from equiport.port.made_unit import MadeUnit
from equiport.port.recipes import BrokenEdit, Recipe, Slots, load_recipes, unserved
from equiport.port.recipes_context import RecipeContext
from equiport.port.scaffold_source import Definition, definitions, imports_of, merged, tidy, with_imports
from equiport.port.unit_weights import statements

#: Parts of the modeling file that units make, in its order.
SECTIONS = ("norm", "rope", "attention", "mlp", "layer", "embedding", "head")
_SKELETONS = ("layer", "embedding", "head")
_CONFIG_FIELD = re.compile(r"\bconfig\.([a-z]\w*)")
# set by the port itself, by the stack, or allowed to be absent
_NOT_REQUIRED = {
    "neuron_config", "num_cores_per_group", "head_dim", "pad_token_id", "rope_theta", "rope_scaling",
    "num_key_value_heads", "partial_rotary_factor", "rope_local_base_freq", "original_max_position_embeddings",
    "sliding_window",
}  # fmt: skip
_IMPORTS = """
import math
import os
from typing import Any
import torch
from torch import Tensor, nn
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBaseOutput
from neuronx_distributed_inference.utils.distributed import get_tp_group
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
"""


@dataclass(frozen=True)
class PortNames:
    """File and class names of a port."""

    module: str
    causal: str
    inner: str
    config: str
    neuron_config: str
    attention: str
    mlp: str
    layer: str

    @classmethod
    def of(cls, fingerprint: Fingerprint, stack: str) -> PortNames:
        """`modeling_llama_nxdi`, `NeuronLlamaForCausalLM`, ..."""
        stem = RecipeContext(fingerprint, frozenset()).stem
        return cls(
            f"modeling_{fingerprint.model_type.replace('-', '_')}_{stack}",
            f"Neuron{stem}ForCausalLM",
            f"Neuron{stem}Model",
            f"{stem}InferenceConfig",
            f"{stem}NeuronConfig",
            f"Neuron{stem}Attention",
            f"Neuron{stem}MLP",
            f"Neuron{stem}DecoderLayer",
        )


class Composer:
    """Renders the parts of one fingerprint's port from its blocks' recipes, the stack's skeletons and made units.

    `made`: units that no recipe made. Their text takes the place of what recipes would put there.
    """

    def __init__(
        self, fingerprint: Fingerprint, blocks: Iterable[str], stack: str = "nxdi", made: Iterable[MadeUnit] = ()
    ) -> None:
        self.fingerprint, self.stack = fingerprint, stack
        self.blocks = tuple(dict.fromkeys(blocks))
        self.made = {item.unit.id: item for item in made}
        self.names = PortNames.of(fingerprint, stack)
        stem = RecipeContext(fingerprint, frozenset()).stem
        theirs = {block for item in self.made.values() for block in item.unit.blocks}
        self.recipes: tuple[Recipe, ...] = _without_weights(load_recipes(stack, self.blocks), theirs)
        names = frozenset(self.blocks) | {recipe.block for recipe in self.recipes}
        norms = made_unit.own_norms(self.made.values(), stem)
        self.context: dict[str, Any] = RecipeContext(fingerprint, names, norms).names()
        self.slots = Slots(self.recipes, self.context)
        self._texts: dict[str, str] = {}
        if self.made:
            provided = {section for item in self.made.values() for section in item.sections}
            taken = [item for name in SECTIONS if name not in provided for item in self._defined_in(name)]
            own = (self.names.config, self.names.neuron_config)
            found = made_unit.texts(self.made.values(), stem, own, taken)
            self._texts = {unit: tidy(text) for unit, text in found.items()}

    def _defined_in(self, section: str) -> list[str]:
        """Names that recipes define in a section; none where a recipe is missing, so that it cannot be rendered."""
        try:
            return [item.name for item in definitions(self._from_recipes(section))]
        except (EquiportError, SyntaxError):
            return []

    def imports(self) -> list[str]:
        """Every import that the port may need."""
        own = [*_IMPORTS.strip().splitlines(), *self._lines("imports"), self._import_of_reference()]
        return [*own, *made_unit.imports(self.made)]

    def section(self, name: str) -> str:
        """Source text of one of SECTIONS, without imports; empty when the model has no such part."""
        texts = [text.strip("\n") for unit, text in self._texts.items() if name in self.made[unit].sections]
        if texts and name == "norm":
            texts += self.slots.parts("norm")
        return "\n\n\n".join(texts) if texts else self._from_recipes(name)

    def _from_recipes(self, name: str) -> str:
        if name == "rope":
            return self._skeleton("rope") if self.fingerprint.ropes else ""
        if name in _SKELETONS:
            return self._skeleton(name)
        if name == "attention":
            return "\n\n\n".join([*self.slots.parts("attention.helpers"), *self.slots.parts("attention")])
        return "\n\n\n".join(self.slots.parts(name))

    def config(self, *, unit: bool = False) -> str:
        """The config classes; for a unit's own file only what its blocks read."""
        required = [] if unit else self._required()
        return self._skeleton("config", unit=unit, refused_flags=self.refused_flags(), required=required)

    def refused_flags(self) -> list[str]:
        """Flags of the stack's settings that the port refuses: those paths do not compute this model."""
        return sorted({line.strip().strip(',"') for line in self._lines("config.refused") if line.strip()})

    def unit_source(self, docstring: str, sections: Iterable[str]) -> str:
        """A unit's own module: a config class, and the sections."""
        body = "\n\n\n".join([self.config(unit=True), *(text for name in sections if (text := self.section(name)))])
        return with_imports(docstring, self.imports(), body)

    def modeling_source(self, units: Mapping[str, str] | None = None) -> str:
        """The whole port. `units`: unit name -> source of its file; without, every section is rendered here.

        Raises:
            EquiportError: two units define one name differently, or the result is not Python.
        """
        if units is None:
            parts = [(name, definitions(self.section(name))) for name in SECTIONS]
            found, imports = merged(parts), self.imports()
        else:
            own = {self.names.config, self.names.neuron_config}
            given = {name: self._texts.get(name, text) for name, text in units.items()}
            parts = [
                (name, [item for item in definitions(text) if item.name not in own]) for name, text in given.items()
            ]
            # norms that recipes have are no affair of a made unit, and stand in no other unit's file then
            added = (*_SKELETONS, "norm") if self.made else _SKELETONS
            whole = [*parts, *(("the skeleton", definitions(tidy(self.section(name)))) for name in added)]
            found = _ordered(merged(whole))
            others = [text for name, text in units.items() if name not in self.made]
            imports = [*self.imports(), *(line for text in others for line in imports_of(text))]
        body = "\n\n\n".join([self.config(), *(item.text for item in found), self._model()])
        return with_imports(self._docstring(), imports, body)

    def broken(self) -> tuple[BrokenEdit, ...]:
        """The edits that take the point of each block away, in the words of this port."""
        return tuple(
            BrokenEdit(edit.name, self._rendered(edit.old, recipe), self._rendered(edit.new, recipe))
            for recipe in self.recipes
            for edit in recipe.broken
        )

    def unserved(self) -> dict[str, tuple[str, ...]]:
        """Block id -> what its recipe does not serve in this fingerprint; blocks that are served whole are left out."""
        found = {recipe.block: unserved(recipe, self.context) for recipe in self.recipes}
        return {block: reasons for block, reasons in found.items() if reasons}

    def _rendered(self, text: str, recipe: Recipe) -> str:
        return self.slots.render(text, str(recipe.folder / "broken.json"))

    def _docstring(self) -> str:
        said = [recipe.summary for recipe in self.recipes if recipe.summary]
        lines = "\n".join(f"- {summary}" for summary in dict.fromkeys(said))
        head = f"{self.context['stem']} for NxD Inference: a port of HuggingFace's `{self.fingerprint.architecture}`."
        return f"{head}\n\n{lines}"

    def _model(self) -> str:
        conversions = {
            "model_conversion": self._conversion("weights.model", 8),
            "layer_conversion": "\n".join(filter(None, [self._conversion("weights.layer", 12), *self._by_cards()])),
        }
        head = "lm_head_projection" if self.context["own_head"] else "lm_head"
        renames = self._model_renames(head)
        if renames:
            conversions["model_conversion"] = "\n".join([*renames, conversions["model_conversion"]]).strip("\n")
        uses = any("rename(converted" in text for text in conversions.values())
        return self._skeleton("model", **conversions, head_module=head, uses_rename=uses)

    def _by_cards(self) -> list[str]:
        """The conversion's statements for the weights of made units, indented."""
        lines = []
        for item in self.made.values():
            places = self.weight_places(item)
            if places is not None:
                lines += statements(item.card.weights, *places)
        return [f"{' ' * 12}{line}" for line in lines]

    def weight_places(self, item: MadeUnit) -> tuple[str, str] | None:
        """(source, port): what the names of a made unit's weights begin with in a layer; None where the skeleton's own
        names hold."""
        f = self.fingerprint
        if item.unit.kind == "attention" and f.attention is not None:
            return f"{f.attention.name}.", "self_attn."
        if item.unit.kind == "mlp" and f.mlp is not None:
            return f"{f.mlp.name}." if f.mlp.name else "", "mlp."
        if item.unit.kind == "moe" and f.moe is not None:
            return f"{f.moe.name}.", "mlp."
        return ("", "") if item.unit.kind == "layer" else None

    def _model_renames(self, head: str) -> list[str]:
        names = self.fingerprint.names
        inside = names.backbone + "."
        moves = [
            (names.embedding.removeprefix(inside), "embed_tokens"),
            (names.final_norm.removeprefix(inside), "norm"),
            (names.lm_head, head),
        ]
        loaded = {names.lm_head + ".": head}
        stored = [(old, loaded[new]) for old, new in self.context["stored_prefixes"]() if new in loaded]
        moves += [(old.removesuffix("."), new) for old, new in stored]
        return [f'        rename(converted, "{old}.", "{new}.")' for old, new in moves if old and old != new]

    def _conversion(self, slot: str, indent: int) -> str:
        return self.slots.text(slot, indent)

    def _lines(self, slot: str) -> list[str]:
        return [line for part in self.slots.parts(slot) for line in part.splitlines()]

    def _import_of_reference(self) -> str:
        return f"from transformers import {self.fingerprint.architecture}"

    def _required(self) -> list[str]:
        text = "\n".join([*(self.section(name) for name in SECTIONS), self._model()])
        found = [name for name in dict.fromkeys(_CONFIG_FIELD.findall(text)) if name not in _NOT_REQUIRED]
        return [*sorted(found)]

    def _skeleton(self, name: str, **extra: Any) -> str:
        path = content_dir("templates") / "scaffold" / self.stack / f"{name}.py.j2"
        return self.slots.render(path.read_text(encoding="utf-8"), str(path), **extra).strip("\n")


def _without_weights(recipes: tuple[Recipe, ...], blocks: set[str]) -> tuple[Recipe, ...]:
    """Recipes of `blocks` lose what they do to the checkpoint: units that made these blocks have rules of their own."""
    return tuple(
        replace(recipe, slots=tuple(slot for slot in recipe.slots if not slot[0].startswith("weights.")))
        if recipe.block in blocks
        else recipe
        for recipe in recipes
    )


def _ordered(found: list[Definition]) -> list[Definition]:
    """Definitions after those they use when they are made (bases, defaults); else in the order given."""
    names = {item.name: item for item in found}
    placed: dict[str, Definition] = {}

    def place(item: Definition) -> None:
        if item.name in placed:
            return
        head = item.text.split(":\n", 1)[0]
        for other in names:
            if other != item.name and re.search(rf"\b{re.escape(other)}\b", head):
                place(names[other])
        placed[item.name] = item

    for item in found:
        place(item)
    return list(placed.values())


def write_modeling(composer: Composer, folder: Path, units: Mapping[str, str] | None = None) -> Path:
    """Write `modeling_<model_type>_<stack>.py` into `folder`, whole or not at all."""
    from equiport.experiment.atomic import write_text

    return write_text(folder / f"{composer.names.module}.py", composer.modeling_source(units))
