"""What a proven cause says to a patch: the inverse of a defect, typed, with source paths and numbers that hold in every
fixture. A template per stack and kind makes the patch file of it; a cause without draft keeps its words alone.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Figure(BaseModel):
    """A number of the source. With `field` it is config.<field> ** power: fixtures differ in their sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    field: str = ""
    power: float = 1.0


class _Draft(BaseModel):
    """`of`: the source modules to be corrected, as paths in the source model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of: tuple[str, ...]


class SetEps(_Draft):
    """The norm's eps."""

    kind: Literal["eps"] = "eps"
    value: float


class ScaleOutput(_Draft):
    """Multiply the module's output; `wide`: the module takes fp32 whatever its weights are, so it rounds but once."""

    kind: Literal["scale output"] = "scale output"
    factor: Figure
    wide: bool = False


class NormFormula(_Draft):
    """Norm as the source does: `centred` takes the mean off, `offset` is added to the weight, `late` weighs in fp32."""

    kind: Literal["norm formula"] = "norm formula"
    eps: float
    centred: bool
    offset: float
    late: bool


class ShiftWeight(_Draft):
    """Add a number to the weight."""

    kind: Literal["shift weight"] = "shift weight"
    by: float


class TransposeWeight(_Draft):
    """Transpose the weight; one that is not square keeps its shape, its values run in the other order."""

    kind: Literal["transpose weight"] = "transpose weight"


Order = Literal[
    "halves swapped", "interleave halves", "part the interleaved", "swap neighbours", "reversed",
    "heads and channels transposed", "channels and heads transposed", "heads reversed", "groups gathered",
]  # fmt: skip


class ReorderWeight(_Draft):
    """Take the weight's rows (axis 0, bias too) or columns (axis 1) in another order before the port converts it."""

    kind: Literal["reorder weight"] = "reorder weight"
    axis: Literal[0, 1]
    order: Order


class SwapWeights(_Draft):
    """The two modules' weights and biases change places."""

    kind: Literal["swap weights"] = "swap weights"


class OwnWeights(_Draft):
    """The module gets its own weights in place of those of `other`."""

    kind: Literal["own weights"] = "own weights"
    other: str


class ScaleBias(_Draft):
    """Multiply the bias."""

    kind: Literal["scale bias"] = "scale bias"
    factor: float


class SoftmaxScale(_Draft):
    """Multiply the scores by this."""

    kind: Literal["softmax scale"] = "softmax scale"
    scale: Figure


class ShiftPositions(_Draft):
    """Add to the positions that the rotation gets in one phase."""

    kind: Literal["shift positions"] = "shift positions"
    phase: Literal["prefill", "decode"]
    by: int


class RotationStyle(_Draft):
    """Rotate q and k: halves, neighbouring pairs, or not at all."""

    kind: Literal["rotation style"] = "rotation style"
    style: Literal["halves", "pairs", "none"]


class RotaryBase(_Draft):
    """Frequencies base ** (-2i / width) / divisor over `share` of each head; of every rotary module."""

    kind: Literal["rotary base"] = "rotary base"
    base: float
    divisor: float
    share: float


class RepeatHeads(_Draft):
    """Key and value heads that the conversion tiles are repeated, each for its group of query heads."""

    kind: Literal["repeat heads"] = "repeat heads"


class SetActivation(_Draft):
    """The activation, by the name of its formula."""

    kind: Literal["activation"] = "activation"
    name: Literal["silu", "gelu (erf)", "gelu (tanh)", "quick gelu", "relu", "relu squared", "sigmoid", "tanh"]


class ShiftTokens(_Draft):
    """Add to the ids that an embedding looks up."""

    kind: Literal["shift tokens"] = "shift tokens"
    by: int


Draft = Annotated[
    SetEps
    | ScaleOutput
    | NormFormula
    | ShiftWeight
    | TransposeWeight
    | ReorderWeight
    | SwapWeights
    | OwnWeights
    | ScaleBias
    | SoftmaxScale
    | ShiftPositions
    | RotationStyle
    | RotaryBase
    | RepeatHeads
    | SetActivation
    | ShiftTokens,
    Field(discriminator="kind"),
]
