"""From what was measured in each layer of the small model to the facets of the model at its own width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from equiport.port.fingerprint import (
    AttentionFacets,
    LayerFacets,
    MlpFacets,
    MoeFacets,
    NormFacets,
    QkNormFacets,
    RopeFacets,
)
from equiport.port.fingerprint_attention import AttentionReading, head_counts, read_attention
from equiport.port.fingerprint_norms import describe_norm
from equiport.port.fingerprint_probe import Probe
from equiport.port.fingerprint_rope import RopeTable, describe_table, factor_of, find_tables
from equiport.port.fingerprint_structure import LayerParts, Structure, in_features, out_features, projections, values_of
from equiport.port.source_reading_facets import TextFacets
from equiport.port.source_reading_model import SourceModel, numbered

Problem = tuple[str, str]  # (facet, what did not fit)


@dataclass(frozen=True)
class AttentionParts:
    """The attention of all layers, at the model's own width."""

    facets: AttentionFacets | None
    layers: tuple[LayerFacets, ...]
    ropes: tuple[RopeFacets, ...]
    problems: tuple[Problem, ...]


def merge_attention(source: SourceModel, probe: Probe, structure: Structure, tables: list[RopeTable]) -> AttentionParts:
    """Read every attention layer; what must be equal in all of them and is not becomes a problem."""
    heads = int(source.config.num_attention_heads)
    readings: dict[int, AttentionReading] = {}
    known: list[Any] = []
    problems: list[Problem] = []
    for index, parts in enumerate(structure.layers):
        if not parts.attention:
            continue
        kind = _layer_type(source, index)
        ordered = sorted(tables, key=lambda table: table.name != kind)
        reading = read_attention(probe, parts, int(probe.config.num_attention_heads), ordered, known)
        readings[index] = reading
        if reading.setting is not None and all(reading.setting != setting for setting, _ in known):
            known.append((reading.setting, reading.scale_source))
    layers = tuple(
        _layer(index, parts, readings.get(index), probe, source) for index, parts in enumerate(structure.layers)
    )
    if not readings:
        return AttentionParts(None, layers, (), ())
    for why in sorted({reading.problem for reading in readings.values() if reading.problem}):
        places = [index for index, reading in readings.items() if reading.problem == why]
        problems.append(("attention", f"{why} (layers {_ranges(places)})"))
    first_index = next((index for index, reading in readings.items() if reading.setting), next(iter(readings)))
    facets = _facets(source, probe, structure.layers[first_index], readings[first_index], heads)
    if len({_core(reading) for reading in readings.values() if reading.setting}) > 1:
        problems.append(("attention", "layers differ in more than window and rotation"))
    if facets and facets.qk_norm:
        normed = tuple(index for index, reading in readings.items() if reading.qk_norm)
        facets = replace(facets, qk_norm=replace(facets.qk_norm, layers=normed))
    ropes, why_not = _ropes(source, probe, readings, tables, facets)
    return AttentionParts(facets, layers, ropes, (*problems, *why_not))


def _core(reading: AttentionReading) -> tuple[Any, ...]:
    setting = reading.setting
    assert setting is not None
    return (reading.projections, reading.heads, setting.layout, setting.scale, setting.softcap, setting.clip,
            reading.sinks, setting.alibi)  # fmt: skip


def _layer(
    index: int, parts: LayerParts, reading: AttentionReading | None, probe: Probe, source: SourceModel
) -> LayerFacets:
    setting = reading.setting if reading else None
    window = None
    if setting and setting.window is not None:
        window = int(full_value(probe, source, parts, float(setting.window), "window"))
    return LayerFacets(
        index=index,
        mixer="recurrent" if parts.recurrent else "attention" if parts.attention else "none",
        mixer_name=parts.recurrent or parts.attention,
        mlp="moe" if parts.moe else "dense" if parts.mlp or parts.inline_mlp else "none",
        window=window,
        rope=setting.table.name if setting and setting.table else "",
        layer_type=_layer_type(source, index),
    )


def _layer_type(source: SourceModel, index: int) -> str:
    kinds = getattr(source.config, "layer_types", None)
    return str(kinds[index]) if isinstance(kinds, (list, tuple)) and index < len(kinds) else ""


def full_value(probe: Probe, source: SourceModel, parts: LayerParts, value: float, word: str) -> float:
    """A constant of the small model at the model's own scale: the config key or module attribute that holds it."""
    own = source.config.to_dict()
    for key, small in probe.config.to_dict().items():
        if word in key and small == value and isinstance(own.get(key), (int, float)):
            return float(own[key])
    small_module = probe.at(parts.at(parts.attention))
    module = source.skeleton.get_submodule(parts.at(parts.attention))
    for key, small in vars(small_module).items():
        if word in key and small == value and isinstance(getattr(module, key, None), (int, float)):
            return float(getattr(module, key))
    return value


def _facets(
    source: SourceModel, probe: Probe, parts: LayerParts, reading: AttentionReading, heads: int
) -> AttentionFacets:
    module = source.skeleton.get_submodule(parts.at(parts.attention))
    linears = projections(module)
    names = reading.projections
    setting = reading.setting
    latent = any(
        "lora" in name or "_a_" in name or "kv_a" in name or "kv_b" in name for name in (*names.extras, *linears)
    )
    if not names.query or names.output not in linears:
        return AttentionFacets(
            parts.attention, type(module).__name__, heads, heads, 0, "unknown", "", "", "", "", False, False, False,
            False, None, "", extras=reading.extras, latent=latent,
        )  # fmt: skip
    widths = {name: out_features(linears[name]) for name in (names.query, names.key, names.value)}
    counts = head_counts(heads, names, widths, in_features(linears[names.output]))
    scale, scale_source = _full_scale(source, probe, module, reading, counts.width)
    qk = reading.qk_norm
    return AttentionFacets(
        name=parts.attention,
        cls=type(module).__name__,
        num_heads=counts.query,
        num_kv_heads=counts.key,
        head_dim=counts.width,
        qkv_layout=setting.layout if setting else ("unknown" if names.fused else "separate"),
        q_name=names.query,
        k_name=names.key,
        v_name=names.value,
        o_name=names.output,
        q_bias=_biased(linears[names.query]),
        k_bias=_biased(linears[names.key]),
        v_bias=_biased(linears[names.value]),
        o_bias=_biased(linears[names.output]),
        scale=scale,
        scale_source=scale_source,
        softcap=full_value(probe, source, parts, setting.softcap, "softcap") if setting and setting.softcap else None,
        clip_qkv=full_value(probe, source, parts, setting.clip, "clip") if setting and setting.clip else None,
        sinks_name=reading.sinks,
        qk_norm=_full_qk(qk, counts.width, counts.query) if qk else None,
        alibi=bool(setting and setting.alibi is not None),
        extras=reading.extras,
        latent=latent,
    )


def _full_qk(qk: QkNormFacets, width: int, heads: int) -> QkNormFacets:
    return replace(qk, norm=replace(qk.norm, width=width * heads if qk.width == "full" else width))


def _biased(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _full_scale(
    source: SourceModel, probe: Probe, module: nn.Module, reading: AttentionReading, head_dim: int
) -> tuple[float | None, str]:
    if reading.setting is None:
        return None, ""
    small, told = reading.setting.scale, reading.scale_source
    if told == "head_dim":
        return head_dim**-0.5, told
    if told == "1/head_dim":
        return 1.0 / head_dim, told
    if not told:
        return small, "constant"
    if told.startswith(type(module).__name__ + "."):
        name = told.rpartition(".")[2]
        return float(getattr(module, name)), told
    value, own = getattr(probe.config, told), getattr(source.config, told)
    for power in (1.0, -0.5, -1.0):
        if abs(value**power - small) < 1e-9 * small:
            return float(own) ** power, told
    return small, told


def _ropes(
    source: SourceModel, probe: Probe, readings: dict[int, AttentionReading], tables: list[RopeTable],
    facets: AttentionFacets | None,
) -> tuple[tuple[RopeFacets, ...], list[Problem]]:  # fmt: skip
    ropes: list[RopeFacets] = []
    problems: list[Problem] = []
    for table in tables:
        users = [reading for reading in readings.values() if reading.setting and reading.setting.table is table]
        if not users:
            continue
        styles = {reading.setting.interleaved for reading in users if reading.setting}
        rope, why = describe_table(
            table, probe.config, source.config, interleaved=styles.pop() if len(styles) == 1 else None,
            head_dims=(users[0].heads.width, facets.head_dim if facets else 0),
            attention_factor=_full_factor(source, table),
        )  # fmt: skip
        ropes.append(rope)
        problems += [(f"rope.{table.name}", text) for text in why]
    return tuple(ropes), problems


def _full_factor(source: SourceModel, table: RopeTable) -> float:
    if not table.path:
        return 1.0
    module = source.skeleton.get_submodule(table.path)
    kind = table.name if hasattr(module, f"{table.name}_attention_scaling") else ""
    return factor_of(module, kind)


def read_tables(probe: Probe, structure: Structure) -> list[RopeTable]:
    """Rotary tables of the small model."""
    head_dim = probe.config.to_dict().get("head_dim")
    return find_tables(probe, int(head_dim or probe.config.hidden_size // probe.config.num_attention_heads))


def merge_norms(
    source: SourceModel, probe: Probe, structure: Structure
) -> tuple[tuple[NormFacets, ...], list[Problem]]:
    """The norms of the layers (each place once), the final one and one on the embeddings."""
    places: dict[str, str] = {}
    for parts in structure.layers:
        for name in parts.norms:
            places.setdefault(f"{structure.names.layers}.{{i}}.{name}", parts.at(name))
    for path in (structure.names.final_norm, structure.names.embedding_norm):
        if path:
            places.setdefault(path, path)
    hidden = int(source.config.hidden_size)
    norms, problems = [], []
    for path, real in places.items():
        found = describe_norm(path, probe.at(real), int(probe.config.hidden_size))
        norms.append(replace(found, width=hidden, eps=_full_eps(source, real, found.eps)))
        if found.kind == "unknown":
            problems.append((f"norm.{numbered(path)}", f"{found.cls} computes neither RMSNorm nor LayerNorm"))
    return tuple(norms), problems


def _full_eps(source: SourceModel, path: str, eps: float | None) -> float | None:
    module = source.skeleton.get_submodule(path)
    values = [value for value in vars(module).values() if isinstance(value, float)]
    return eps if eps is None or not values or eps in values else values[0]


def full_mlp(source: SourceModel, parts: LayerParts, mlp: MlpFacets) -> MlpFacets:
    """A dense block's facets at the model's own width."""
    path = f"{parts.at(parts.mlp)}.{mlp.down_name}" if parts.mlp else parts.at(mlp.down_name)
    return replace(mlp, intermediate_size=in_features(source.skeleton.get_submodule(path)))


def read_moe(source: SourceModel, structure: Structure, text: TextFacets) -> MoeFacets | None:
    """The expert block, described from its modules and its text, so that the plan can name it."""
    places = [parts for parts in structure.layers if parts.moe]
    if not places:
        return None
    path = places[0].at(places[0].mlp)
    module = source.skeleton.get_submodule(path)
    values = values_of(source.config)
    names = [name for name, _ in module.named_modules()]
    stacked = any(parameter.dim() >= 3 for parameter in module.parameters())
    own = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    shared = next((name for name in own if "shared" in name and "gate" not in name), "")
    router = next((name for name in own if ("gate" in name or "router" in name) and "shared" not in name), "")
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    chosen = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k", "moe_top_k")
    experts = next((values[key] for key in counts if isinstance(values.get(key), int)), 0)
    state = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
    norm = values.get("norm_topk_prob")
    return MoeFacets(
        name=places[0].mlp,
        cls=type(module).__name__,
        router_path=numbered(f"{path}.{router}") if router else "",
        router_kind=text.router,
        num_experts=int(experts) or sum(1 for name in names if name.startswith("experts.") and name.count(".") == 1),
        experts_per_token=next((values[key] for key in chosen if isinstance(values.get(key), int)), None),
        renormalised=norm if isinstance(norm, bool) else text.renormalised,
        shared_expert=shared,
        correction_bias=any("correction" in name or "e_score" in name for name in state),
        expert_layout="stacked" if stacked else "modules",
        layers=tuple(index for index, parts in enumerate(structure.layers) if parts.moe),
    )


def _ranges(places: list[int]) -> str:
    if len(places) > 6:
        return f"{places[0]}-{places[-1]}, {len(places)} of them"
    return ", ".join(str(place) for place in places)
