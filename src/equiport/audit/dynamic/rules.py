"""Rules about what happens when tests and ports run; `equiport audit --explain` shows them like the others."""

from __future__ import annotations

from equiport.audit.model import Rule, Severity


def _rule(name: str, severity: Severity, title: str, why: str, remedy: str) -> Rule:
    return Rule(name, severity, title, why, remedy, check=lambda module: (), bad=(), good=())


_ERROR, _WARNING = Severity.ERROR, Severity.WARNING
MUTANT_LIVES = _rule(
    "mutant-lives", _ERROR, "the test passes although the port is wrong",
    "A test that passes with noise, zeros, a constant or 1.01 times the port's output says nothing about the port.",
    "Let the port's output reach the comparator, and assert its verdict.",
)  # fmt: skip
SCORE_LOW = _rule(
    "mutation-score", _ERROR, "too few wrong ports are noticed",
    "Less than nine in ten bugs that change the port's output make the test fail.",
    "Compare every output of the block, in float32 too, on inputs that excite each part of it.",
)  # fmt: skip
PORT_NOT_RUN = _rule(
    "port-not-run", _ERROR, "no test of the file runs the port",
    "Whatever it compares, it is not the port.",
    "Call the port's class in the test and compare what it gives.",
)  # fmt: skip
TEST_NOT_RUN = _rule(
    "test-not-run", _WARNING, "the test does not pass as it stands",
    "Whether it would notice a wrong port can only be tried on a test that passes.",
    "Make the test run here: without network, in its own folder, with this interpreter.",
)  # fmt: skip
RUNS_REFERENCE = _rule(
    "runs-reference", _ERROR, "the port runs the reference's code",
    "It agrees with the reference on a CPU and proves nothing of what will run on a device.",
    "Write the block with the stack's primitives; leaves (norms, activations, rotary tables) may be borrowed.",
)  # fmt: skip
NOT_DETERMINISTIC = _rule(
    "not-deterministic", _ERROR, "the port does not repeat itself",
    "Called again on the same inputs it gives something else: it counts calls, remembers tensors or draws numbers.",
    "Compute from the arguments' values; state goes into the KV cache.",
)  # fmt: skip
INPUT_CHANGED = _rule(
    "input-changed", _WARNING, "the port changes its inputs",
    "A reference that runs afterwards on the same tensor is given what the port made of it.",
    "Work on a copy.",
)  # fmt: skip
READS_UNINITIALISED = _rule(
    "reads-uninitialised", _ERROR, "uninitialised memory is read",
    "With NaN in every allocation that promises nothing, the test fails: it lived on what lay in memory.",
    "Allocate with zeros, or write before reading.",
)  # fmt: skip
SEED_BOUND = _rule(
    "seed-bound", _ERROR, "the test passes with its author's seed alone",
    "On other random weights and inputs it fails each time.",
    "Find out what the port gets wrong; no seed may be special.",
)  # fmt: skip
SHAPE_BOUND = _rule(
    "shape-bound", _ERROR, "the test passes with its author's shapes alone",
    "With another batch, or a shorter sequence, the port gives something else than the source.",
    "Compute for any shape that the source takes.",
)  # fmt: skip
COMPARATOR_CHANGED = _rule(
    "comparator-changed", _ERROR, "the comparator that ran is not the toolkit's own",
    "Whoever writes the judge decides the judgement.",
    "Import the comparator as it ships and change nothing of it.",
)  # fmt: skip
CIRCULAR = _rule(
    "circular-comparison", _ERROR, "what is compared is one thing",
    "Equal to the last bit by the same code: that is no comparison of two implementations.",
    "Run the source's class and the port's class each on the inputs, and compare what they gave.",
)  # fmt: skip
RUN_BROKEN = _rule(
    "run-broken", _WARNING, "a check did not come to its end",
    "It ran into its limit of time or memory, or its process ended: nothing was learnt.",
    "Make the test smaller, or give more seconds.",
)  # fmt: skip

DYNAMIC_RULES: tuple[Rule, ...] = (
    MUTANT_LIVES, SCORE_LOW, PORT_NOT_RUN, TEST_NOT_RUN, RUNS_REFERENCE, NOT_DETERMINISTIC, INPUT_CHANGED,
    READS_UNINITIALISED, SEED_BOUND, SHAPE_BOUND, COMPARATOR_CHANGED, CIRCULAR, RUN_BROKEN,
)  # fmt: skip
