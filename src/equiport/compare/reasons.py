"""The closed set of reason codes that gates of this package give."""

from __future__ import annotations

from enum import Enum

from equiport.compare.verdict import Reason


class ReasonCode(str, Enum):
    """Machine-readable reasons. Each member's comment says when it is given."""

    # integrity: the comparison cannot stand for anything
    SHAPE_MISMATCH = "SHAPE_MISMATCH"  # the tensors' shapes differ
    UNSUPPORTED_TENSOR = "UNSUPPORTED_TENSOR"  # complex, sparse, quantised, meta or no tensor at all
    EMPTY = "EMPTY"  # no element was compared, or the list of evidence is empty
    NAN_MASK = "NAN_MASK"  # NaN, Inf or mask fills sit at different places
    NON_FINITE_METRIC = "NON_FINITE_METRIC"  # a metric that a gate needs is NaN or infinite
    DEGENERATE_TARGET = "DEGENERATE_TARGET"  # a zero or constant target against a varying reference
    DEGENERATE_REFERENCE = "DEGENERATE_REFERENCE"  # a constant reference cannot show a fault
    SAME_TENSOR = "SAME_TENSOR"  # two of the tensors are one and the same memory
    REFERENCES_SWAPPED = "REFERENCES_SWAPPED"  # ref_fp32 has bf16 values only, ref_bf16 has not
    BASELINE_NOISE = "BASELINE_NOISE"  # ref_bf16 is so far from ref_fp32 that a ratio says nothing
    # exact mode
    EXACT_MISMATCH = "EXACT_MISMATCH"  # the baseline is exact and the target is not
    EXACT_EQUAL = "EXACT_EQUAL"  # note: equal to ref_bf16 bit for bit
    EXACT_ROUNDING = "EXACT_ROUNDING"  # note: equal up to fp32 rounding
    EXACT_ULP = "EXACT_ULP"  # note: equal within one bf16 ulp, where the reduction order may differ
    INTEGER_NOISE = "INTEGER_NOISE"  # integers on which ref_fp32 and ref_bf16 disagree already
    # fp32 gate
    R32_POOLED = "R32_POOLED"
    R32_SLICE = "R32_SLICE"
    NO_FP32_EVIDENCE = "NO_FP32_EVIDENCE"  # blind spot: no target_fp32 was given
    # bf16 gate
    R_SINGLE = "R_SINGLE"  # one draw's R is at or above the documented 1.2
    R_GEOMEAN = "R_GEOMEAN"  # geometric mean over layers and seeds of a component type
    R_COMPONENT = "R_COMPONENT"  # geometric mean over one component's seeds
    R_LAYERS = "R_LAYERS"  # over some layers of a component, beside others that round as the source does or less
    LINF = "LINF"
    R_SLICE = "R_SLICE"
    SEEDS_STRADDLE = "SEEDS_STRADDLE"  # some seeds below the threshold, some above
    TOO_FEW_SEEDS = "TOO_FEW_SEEDS"
    TOO_FEW_ELEMENTS = "TOO_FEW_ELEMENTS"  # R of so small a tensor is luck
    OVER_PRECISION = "OVER_PRECISION"  # note: R clearly below 1
    R_ZERO = "R_ZERO"  # note: the target equals ref_fp32
    CPU_CLASS = "CPU_CLASS"  # only rounds more than its source, and the device builds another class
    ROUTER_NOISE = "ROUTER_NOISE"  # too many tokens have a router's margin within the noise
    # three-way gate of vLLM-Neuron
    BC_SIGMA = "BC_SIGMA"
    LINF_RATIO = "LINF_RATIO"
    L2_RATIO = "L2_RATIO"
    # end to end
    R_CENTRED = "R_CENTRED"
    P95_RATIO = "P95_RATIO"
    COSINE_P5 = "COSINE_P5"
    KL_P95 = "KL_P95"
    TOP1 = "TOP1"
    TOO_FEW_PROMPTS = "TOO_FEW_PROMPTS"
    NOT_CALIBRATED = "NOT_CALIBRATED"  # note: a shipped, uncalibrated threshold was used
    # smoke
    MATCH_RATE = "MATCH_RATE"
    TOO_FEW_TOKENS = "TOO_FEW_TOKENS"
    # alive and consistency
    DEAD_TENSOR = "DEAD_TENSOR"  # a tensor moves the source's logits and not the port's
    UNREAD_KEY = "UNREAD_KEY"  # a config key does
    ONLY_PORT_MOVES = "ONLY_PORT_MOVES"  # a tensor moves the port's logits and not the source's
    ALIVE_REFUSED = "ALIVE_REFUSED"  # note: the port refuses the changed config
    NOT_EXCITED = "NOT_EXCITED"  # blind spot: a nudge moves neither side
    INCONSISTENT = "INCONSISTENT"  # two ways to the same logits differ
    SHAPE_FAULT = "SHAPE_FAULT"  # fp32 logits differ from the source's in a batch or length of its own
    # downstream
    DOWNSTREAM_REGRESSION = "DOWNSTREAM_REGRESSION"  # a task's score falls by more than the tolerance
    TOO_FEW_ITEMS = "TOO_FEW_ITEMS"  # the interval of the difference is too wide
    BASELINE_AT_CHANCE = "BASELINE_AT_CHANCE"  # the source itself only guesses: no fault would show
    NO_BASELINE = "NO_BASELINE"  # the source did not run and no published score is given
    ITEMS_DIFFER = "ITEMS_DIFFER"  # both sides did not answer the same items
    NO_PAIRED_SCORE = "NO_PAIRED_SCORE"  # the task gives no score per item that can be paired
    # embeddings
    EMBEDDING_COSINE = "EMBEDDING_COSINE"  # a prompt's embedding does not point where the reference's does
    EMBEDDING_NOISE = "EMBEDDING_NOISE"  # cosines hold, yet the error is many times that of bf16
    EMBEDDING_NORM = "EMBEDDING_NORM"  # the vector's length differs: normalised on one side, or scaled
    CROSS_COSINE = "CROSS_COSINE"  # unrelated prompts are nearer, or farther, than in the reference
    COLLAPSED = "COLLAPSED"  # prompts are told apart less well than the reference tells them apart
    CONFUSED = "CONFUSED"  # a prompt's vector is as far from its own reference as from that of another prompt
    REFERENCE_COLLAPSED = "REFERENCE_COLLAPSED"  # the reference itself does not tell prompts apart
    BATCH_DEPENDENT = "BATCH_DEPENDENT"  # a prompt's embedding differs alone and in a batch
    NEIGHBOUR_LEAK = "NEIGHBOUR_LEAK"  # a prompt's embedding follows what its neighbours say
    NOT_BATCHED = "NOT_BATCHED"  # nothing was seen in a batch of unequal lengths
    # evidence
    NO_COMPARISON = "NO_COMPARISON"  # nothing was compared at all


def reason(code: ReasonCode, message: str, subject: str = "") -> Reason:
    """A `Reason` whose code is from the closed set."""
    return Reason(code.value, message, subject)


#: An undecided component is no failing one: more seeds, more tokens or a device would tell.
UNDECIDED = frozenset(code.value for code in (ReasonCode.SEEDS_STRADDLE, ReasonCode.CPU_CLASS, ReasonCode.ROUTER_NOISE))
