"""Latent attention: which width its scores are scaled by, and whether yarn's mscale is in the scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery, has_core

_WIDTHS = ("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


class LatentScale(Hypothesis):
    """The scale is that of another width, or lacks the square of mscale."""

    kind = "softmax scale"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Each width of the attention, with and without the factor that the source has beyond its own width's."""
        for path, module in case.sites(Part.ATTENTION):
            full = getattr(module, "qk_head_dim", None)
            own = getattr(module, "scaling", None)
            if not isinstance(full, int) or not isinstance(own, float) or not has_core(module):
                continue
            factor = own / full**-0.5
            factors = {"": 1.0}
            if abs(factor - 1) > 1e-6:
                factors = {" without mscale": 1.0, " with mscale squared": factor, " with mscale once": factor**0.5}
            for width in _WIDTHS:
                size = getattr(module, width, None)
                for words, times in factors.items():
                    value = float(size) ** -0.5 * times if isinstance(size, int) and size else own
                    if abs(value / own - 1) < 1e-6:
                        continue

                    def edit(at: Case, surgery: Surgery, path: str = path, value: float = value) -> None:
                        surgery.core(at.model.get_submodule(path), lambda call: call.with_option("scaling", value))

                    yield Candidate(
                        f"scores of {path} are scaled by {width}**-0.5{words} = {value:.6g}, the source's {own:.6g}",
                        edit,
                        f"scale the scores by {own:.8g}",
                    )
