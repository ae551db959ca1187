"""`fingerprint(model_dir)`: config keys, source text and a measured small model, brought together.

The three must agree. Where they do not, or where none settles a facet, the fingerprint carries an open question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equiport.errors import EquiportError
from equiport.port.fingerprint import Fingerprint, LayerFacets, LayerNorms, OpenQuestion, Route, SourceNames
from equiport.port.fingerprint_blocks import source_blocks
from equiport.port.fingerprint_contracts import read_contracts
from equiport.port.fingerprint_ends import read_ends
from equiport.port.fingerprint_keys import describe_keys
from equiport.port.fingerprint_merge import (
    AttentionParts,
    Problem,
    full_mlp,
    merge_attention,
    merge_norms,
    read_moe,
    read_tables,
)
from equiport.port.fingerprint_mlp import read_mlp
from equiport.port.fingerprint_probe import Probe, one_thread, run_probe, same
from equiport.port.fingerprint_questions import questions_of
from equiport.port.fingerprint_residual import Residual, read_residual
from equiport.port.fingerprint_route import outside_parts, recurrent_parts, route_by_config, route_by_structure
from equiport.port.fingerprint_structure import Structure, find_structure
from equiport.port.source_reading_facets import read_text
from equiport.port.source_reading_keys import keys_read, unread_keys
from equiport.port.source_reading_model import (
    SourceModel,
    load_source,
    model_type_of,
    numbered,
    relative_file,
    stored_keys,
)


def fingerprint(model_dir: str | Path, *, trust_remote_code: bool = False) -> Fingerprint:
    """The architecture of a HuggingFace folder. config.json alone suffices; stored weights' names are compared.

    Code that the folder brings is run only with `trust_remote_code`.

    Raises:
        EquiportError: no folder, no or broken config.json, unknown model_type, remote code without the flag.
    """
    source = load_source(Path(model_dir), trust_remote_code=trust_remote_code)
    with one_thread():
        return _read(source)


def _read(source: SourceModel) -> Fingerprint:
    base = _outline(source)
    if base.route in ("multimodal", "encoder_decoder"):
        return replace(base, unsupported=outside_parts(source, base.route))
    if base.route in ("recurrent", "hybrid"):
        # named, not translated: nothing of its mathematics is claimed
        return replace(base, unsupported=(*base.unsupported, *recurrent_parts(base)))
    try:
        probe = run_probe(source)
    except EquiportError as error:
        return _unmeasured(source, base, error.what)
    structure = find_structure(probe.model, probe.config, int(probe.config.hidden_size))
    if structure is None:
        return _unmeasured(source, base, "no stack of layers was found in the model")
    return _measured(source, base, probe, structure)


def _outline(source: SourceModel) -> Fingerprint:
    """What config and skeleton say before anything is measured."""
    config = source.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    structure = find_structure(source.skeleton, text, int(getattr(text, "hidden_size", 0) or 0))
    route = route_by_config(source) or (route_by_structure(structure) if structure else "decoder")
    read = keys_read(source)
    import transformers

    return Fingerprint(
        model_type=model_type_of(source.folder, source.raw),
        architecture=source.cls.__name__,
        source_file=relative_file(source.file),
        transformers_version=transformers.__version__,
        route=route,
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        max_positions=_positive(getattr(text, "max_position_embeddings", None)),
        names=structure.names if structure else SourceNames("", "", "", "", ""),
        layers=_outline_layers(structure),
        residual="unknown",
        layer_norms=LayerNorms(),
        norms=(),
        attention=None,
        ropes=(),
        mlp=None,
        moe=read_moe(source, structure, read_text(source)) if structure else None,
        config_keys=describe_keys(source, read),
        blocks=source_blocks(source, structure),
        state_dict_keys=tuple(sorted({numbered(name) for name in source.skeleton.state_dict()})),
        unread_keys=tuple(unread_keys(source, read)),
        unsupported=structure.outside if structure else (),
    )


def _outline_layers(structure: Structure | None) -> tuple[LayerFacets, ...]:
    if structure is None:
        return ()
    return tuple(
        LayerFacets(
            index,
            "recurrent" if parts.recurrent else "attention" if parts.attention else "none",
            parts.recurrent or parts.attention,
            "moe" if parts.moe else "dense" if parts.mlp or parts.inline_mlp else "none",
        )
        for index, parts in enumerate(structure.layers)
    )


def _unmeasured(source: SourceModel, base: Fingerprint, why: str) -> Fingerprint:
    """A model that no small copy could be run of: nothing of its mathematics is claimed."""
    question = OpenQuestion(
        id="source.measure",
        question=f"No small copy of the model could be run ({why}). Is the port to be planned from its text by hand?",
        evidence=(why,),
        choices=("by_hand", "stop"),
    )
    return replace(base, questions=(question,), unsupported=(*base.unsupported, f"not measured: {why}"))


@dataclass(frozen=True)
class _Layers:
    """What the layers have in common."""

    residual: Residual
    problems: tuple[Problem, ...]


def _measured(source: SourceModel, base: Fingerprint, probe: Probe, structure: Structure) -> Fingerprint:
    route = _checked_route(probe, base.route)
    attention = merge_attention(source, probe, structure, read_tables(probe, structure))
    layers = _layers(probe, structure)
    norms, norm_problems = merge_norms(source, probe, structure)
    mlp, mlp_problems = _mlp(source, probe, structure)
    blocks = source_blocks(source, structure)
    ends = read_ends(probe, structure.names, source.config, layers.residual.factor)
    found = replace(
        base,
        route=route,
        names=structure.names,
        layers=attention.layers,
        residual=layers.residual.layout,
        layer_norms=layers.residual.norms,
        norms=norms,
        attention=attention.facets,
        ropes=attention.ropes,
        mlp=mlp,
        moe=read_moe(source, structure, read_text(source)),
        multipliers=ends.multipliers,
        tied_embeddings=_tied(probe.model),
        lm_head_bias=_head_bias(probe, structure.names.lm_head),
        logits_softcap=ends.softcap,
        learned_positions=ends.learned_positions,
        position_offset=ends.position_offset,
        blocks=blocks,
        contracts=read_contracts(probe, blocks),
        unsupported=(*structure.outside, *_unsupported(structure, attention, route)),
    )
    problems = [*attention.problems, *layers.problems, *norm_problems, *mlp_problems, *ends.problems]
    return replace(found, questions=questions_of(source, found, problems, stored_keys(source.folder)))


def _layers(probe: Probe, structure: Structure) -> _Layers:
    readings = [read_residual(probe, parts) for parts in structure.layers]
    problems: list[Problem] = []
    for why in sorted({reading.problem for reading in readings if reading.problem}):
        places = [index for index, reading in enumerate(readings) if reading.problem == why]
        problems.append(("layer", f"{why} (first in layer {places[0]}, {len(places)} of {len(readings)})"))
    for index in range(1, len(structure.layers)):
        before, after = (probe.call(structure.layers[place].path) for place in (index - 1, index))
        if before and after and not same(before.output, after.input):
            problems.append(("layer", f"layer {index} is not given what layer {index - 1} made"))
            break
    kinds = {(reading.layout, reading.norms) for reading in readings}
    if len(kinds) > 1 and not problems:
        problems.append(("layer", "layers differ in where their norms stand"))
    first = next((reading for reading in readings if not reading.problem), readings[0])
    return _Layers(first, tuple(problems))


def _mlp(source: SourceModel, probe: Probe, structure: Structure) -> tuple[Any, list[Problem]]:
    found: dict[Any, int] = {}
    problems: list[Problem] = []
    parts_of: dict[Any, Any] = {}
    for index, parts in enumerate(structure.layers):
        if parts.moe or not (parts.mlp or parts.inline_mlp):
            continue
        facets, why = read_mlp(probe, parts)
        if facets is None:
            problems.append(("mlp", f"{why} (layer {index})"))
            break
        found.setdefault(facets, index)
        parts_of.setdefault(facets, parts)
    if len(found) > 1:
        problems.append(("mlp", f"dense blocks differ between layers {', '.join(map(str, found.values()))}"))
    if not found:
        return None, problems
    first = next(iter(found))
    return full_mlp(source, parts_of[first], first), problems


def _unsupported(structure: Structure, attention: AttentionParts, route: Route) -> tuple[str, ...]:
    parts = []
    for name in sorted({other for parts in structure.layers for other in parts.others}):
        parts.append(f"layer part {name}")
    if route == "encoder":
        parts.append("attention that looks ahead: tokens see later tokens")
    if attention.facets and attention.facets.extras:
        parts.append(f"attention parts {', '.join(attention.facets.extras)}")
    return tuple(parts)


def _checked_route(probe: Probe, route: Route) -> Route:
    """`encoder` when a later token changes an earlier token's logits."""
    import torch

    changed = probe.tokens.clone()
    changed[0, -1] = 3 if int(changed[0, -1]) != 3 else 4
    with torch.no_grad():
        logits = probe.model(input_ids=changed, use_cache=False).logits
    return route if same(logits[:, :-1], probe.logits[:, :-1], 1e-4) else "encoder"


def _tied(model: nn.Module) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    return head is not None and table is not None and head.weight is table.weight


def _head_bias(probe: Probe, path: str) -> bool:
    return bool(path) and getattr(probe.at(path), "bias", None) is not None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
