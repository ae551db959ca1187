"""Thresholds of all gates: the shipped numbers, the documented ones, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport.errors import EquiportError

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]
_Limits = TypeVar("_Limits", bound=BaseModel)


class Thresholds(BaseModel):
    """Limits of the gates. `<` and `<=` as named in each comment; ratios have no unit, KL is in nats."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # fp32 gate
    r32_pooled: _Positive = 1e-3  # R32 <=
    r32_slice: _Positive = 2e-3  # R32 of any slice <=
    # bf16 gate, components
    r_single: _Positive = 1.2  # R of a single draw <
    r_geomean: _Positive = 1.10  # geometric mean of R over layers and seeds of a component type <
    # in place of r_geomean, by component type; none ships: calibrated ones are not below 1.10 (docs/calibration.md)
    tau_r_by_type: dict[str, _Positive] = Field(default_factory=dict)
    r_component: _Positive = 1.5  # geometric mean of R over one component's seeds <
    r_layer: _Positive = 1.2  # geometric mean of R over one layer's seeds and phases <
    linf_ratio: _Positive = 50.0  # L∞ ratio <=
    r_slice: _Positive = 100.0  # R of any slice <=
    min_seeds: _Count = 3
    decisive_seeds: _Count = 5  # straddling seeds are decided by their confidence interval from here on
    over_precision: _Positive = 0.7  # R below is noted
    r_floor: _Positive = 0.5  # a smaller R counts as this in a geometric mean: over-precision buys no credit
    unsure_tokens: _Share = 0.10  # share of a component's tokens with a router's margin within the noise <=
    baseline_noise: _Positive = 0.5  # ‖ref_bf16 − ref_fp32‖ / ‖ref_fp32‖ <=
    # end to end
    tau_r: _Positive = 1.2  # pooled centred R <
    p95_ratio: _Positive = 1.3  # p95(err) / p95(base), centred <
    theta: _Share = 0.995  # centred cosine p5 >=
    delta: _Positive = 0.01  # KL p95 <=
    top1: _Share = 0.9  # top-1 agreement >
    # where the source's own bf16 is past θ, δ or top-1, its figure x this is the limit (1.3²: cosine and KL go by the
    # square of an error); 0, and calibrated limits: never
    own_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.69
    min_prompts: _Count = 10
    calibrated: bool = False  # True in files written by the calibration
    # three-way gate of vLLM-Neuron
    bc: _Share = 0.99  # BC >=, or
    sigma: _Positive = 1.0  # sigma ratio <=
    stack_linf_ratio: _Positive = 5.0  # L∞ ratio <
    stack_l2_ratio: _Positive = 3.0  # L2 ratio <
    # alive and consistency
    alive: _Positive = 1e-5  # relative change of fp32 logits that counts as moving
    consistency: _Positive = 1e-3  # difference of two ways to the same logits / bf16 baseline <=, or
    consistency_own: _Positive = 5.0  # this many times the reference's own difference
    # smoke
    match_rate: _Share = 0.30  # overall match rate >
    min_match_tokens: _Count = 32  # fewer scored tokens prove nothing

    def component_limit(self, component_type: str) -> float:
        """Limit of the geometric mean of R over a component type: calibrated for this type, or `r_geomean`."""
        return self.tau_r_by_type.get(component_type, self.r_geomean)

    def save(self, path: str | Path) -> None:
        """Write the thresholds as JSON."""
        Path(path).write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")


#: The numbers that ship, until a calibration replaces them.
SHIPPED_THRESHOLDS = Thresholds()
#: The documented values of seed 003, shown beside the shipped ones. It gives none for δ: the shipped one stands in.
SEED_THRESHOLDS = Thresholds(r_geomean=1.2, r_component=1.2, theta=0.95, top1=0.5)


def load_thresholds(path: str | Path) -> Thresholds:
    """Read a thresholds file; keys left out have their shipped value.

    Raises:
        EquiportError: the file is missing, no JSON object, or has an unknown key or a bad value (named).
    """
    return read_limits(path, Thresholds, "run_calibration.py writes one.")


def read_limits(path: str | Path, kind: type[_Limits], remedy: str) -> _Limits:
    """Read a file of limits of this kind; `remedy`: where one comes from.

    Raises:
        EquiportError: the file is missing, no JSON object, or has an unknown key or a bad value (named).
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EquiportError("cannot read the thresholds file", where=path, remedy=remedy) from error
    except ValueError as error:
        raise EquiportError(f"no valid JSON: {error}", where=path, remedy=remedy) from error
    if not isinstance(data, dict):
        raise EquiportError("expected a JSON object of thresholds", where=path)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise EquiportError(
            first["msg"],
            where=path,
            field=".".join(str(part) for part in first["loc"]),
            remedy=f"Known keys: {', '.join(kind.model_fields)}." if first["type"] == "extra_forbidden" else "",
        ) from error
