"""What one comparison measured: raw metrics only. Verdicts are computed from it by gates, never baked in."""

from __future__ import annotations

from typing import Literal

from equiport.compare.numbers import Frozen, Number
from equiport.compare.slices import WorstSlice

Mode = Literal["ratio", "exact"]


class Labels(Frozen):
    """What a comparison speaks of; carried into records so that evidence can be grouped."""

    component: str = ""
    component_type: str = ""
    layer: int | None = None
    seed: int | None = None
    fixture: str = ""
    phase: Literal["", "prefill", "decode"] = ""


class SetAside(Frozen):
    """Elements left out of all metrics, by kind (identical in all tensors); `mismatched` sit at different places.

    `mismatched_target` are those where the target's class differs from ref_fp32's, `mismatched_baseline` those where
    ref_bf16's does, `mismatched_fp32` those where target_fp32's does.
    """

    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    fill: int = 0
    mismatched_target: int = 0
    mismatched_baseline: int = 0
    mismatched_fp32: int = 0

    @property
    def mismatched(self) -> int:
        """Elements whose class differs somewhere."""
        return self.mismatched_target + self.mismatched_baseline + self.mismatched_fp32


class Exactness(Frozen):
    """Exact mode: how many elements of the target differ from ref_bf16, by severity.

    `unequal`: not the same value; `beyond_rounding`: further than fp32 rounding; `beyond_ulp`: further than one bf16
    ulp; `max_ulps` in bf16 ulps; `reorder`: True where the reduction order may differ (a split baseline, or a baseline
    that is not exactly 0) and ref_bf16 holds bf16 values, so that one ulp is allowed.
    """

    unequal: int
    beyond_rounding: int
    beyond_ulp: int
    max_ulps: Number
    reorder: bool


class Comparison(Frozen):
    """One comparison of a target with its reference. Norms are over the elements that all tensors have finite.

    `r_ratio`, `r32`, `sigma_ratio`, `linf_ratio`, `l2_ratio`, `bc`, `cosine`, `nmse`: see docs of `compare_3tensors`.
    In mode `exact` the slices and `r32` are relative to the nominal bf16 rounding error of the reference.
    `tokens_unsure` of all `tokens` have a router's margin within the noise: bf16 errors were not counted there.
    """

    name: str
    method: Literal["3-tensor", "2-tensor"] = "3-tensor"
    baseline: str = "plain"
    labels: Labels = Labels()
    shape: tuple[int, ...]
    dtypes: dict[str, str]
    mode: Mode
    draws: int = 1
    elements: int
    set_aside: SetAside = SetAside()
    ref_norm: Number
    baseline_error: Number
    target_error: Number
    target_fp32_error: Number | None = None
    r_ratio: Number
    r32: Number | None = None
    sigma_ratio: Number
    mean_shift: Number
    bc: Number
    baseline_linf: Number
    target_linf: Number
    linf_ratio: Number
    l2_ratio: Number
    cosine: Number
    cosine_centred: Number
    nmse: Number
    r_slices: tuple[WorstSlice, ...] = ()
    r32_slices: tuple[WorstSlice, ...] = ()
    exactness: Exactness | None = None
    integers: bool = False
    reference_varies: bool
    target_varies: bool
    ref_fp32_beyond_bf16: int
    ref_bf16_beyond_bf16: int
    target_beyond_bf16: int
    same_memory: tuple[str, ...] = ()
    tokens: int = 0
    tokens_unsure: int = 0
    plots: tuple[str, ...] = ()

    @property
    def r_slice(self) -> WorstSlice | None:
        """The worst bf16 slice over all axes; None when no axis is longer than 1."""
        return _worst(self.r_slices)

    @property
    def r32_slice(self) -> WorstSlice | None:
        """The worst fp32 slice over all axes; None without target_fp32 or when no axis is longer than 1."""
        return _worst(self.r32_slices)

    @property
    def noise(self) -> float:
        """‖baseline error‖ relative to ‖ref_fp32‖."""
        return self.baseline_error / self.ref_norm if self.ref_norm else float(self.baseline_error > 0)

    def to_json(self) -> str:
        """One line of JSON."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """The inverse of `to_json`."""
        return cls.model_validate_json(text)


def _worst(slices: tuple[WorstSlice, ...]) -> WorstSlice | None:
    # NaN first: max() would lose it
    broken = [item for item in slices if item.ratio != item.ratio]
    return broken[0] if broken else max(slices, key=lambda item: item.ratio, default=None)
