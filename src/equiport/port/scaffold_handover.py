"""HANDOVER.md: how this very port is compiled on a device and served, and what of that was not run."""

from __future__ import annotations

from pathlib import Path

from equiport.content import content_dir
from equiport.port.plan_schema import PortPlan
from equiport.port.recipes import environment
from equiport.port.scaffold import Composer
from equiport.stacks.port_classes import PortClasses

HANDOVER_NAME = "HANDOVER.md"
# blocks whose statistics span all heads: a rank has some of them
_SINGLE_RANK = {
    "attention.qk_norm_full": "the norms on queries and keys span all heads",
    "attention.qk_norm_per_head_weights": "each head has a norm of its own",
}
# what vLLM's loader turns on by itself
_SERVED_BY_DEFAULT = ("sequence_parallel_enabled", "is_continuous_batching", "enable_bucketing")
_LONGEST = 2048


def handover(plan: PortPlan, composer: Composer, model: Path, port: Path, classes: PortClasses) -> str:
    """Markdown from `templates/scaffold/<stack>/HANDOVER.md.j2`, with the names and limits of this port.

    Source: the loader's table, default settings and look-up of artifacts as vLLM's Neuron loader documents them.
    """
    template = (content_dir("templates") / "scaffold" / plan.stack / "HANDOVER.md.j2").read_text(encoding="utf-8")
    refused = composer.refused_flags()
    reasons = [reason for block, reason in _SINGLE_RANK.items() if block in composer.blocks]
    made = environment().from_string(template)
    text = made.render(
        f=plan.fingerprint,
        model=str(model),
        module=port.stem,
        classes=classes,
        seq_len=min(_LONGEST, plan.fingerprint.max_positions or _LONGEST),
        refused=refused,
        overrides={flag: False for flag in refused if flag in _SERVED_BY_DEFAULT},
        single_rank=reasons[0] if reasons else "",
    )
    return text.rstrip("\n") + "\n"


def summary(plan: PortPlan, port: Path, classes: PortClasses, page: Path) -> tuple[str, ...]:
    """The same in a few lines, for the end of `equiport port`."""
    return (
        f"compile on a device: {classes.causal}(MODEL, config).compile(COMPILED), settings in {page}",
        f"serve with vLLM: {plan.fingerprint.architecture} -> ({port.stem}, {classes.causal}), "
        "artifacts in NEURON_COMPILED_ARTIFACTS",
        "not run on a device: compilation, kernels, several ranks, batching in flight, sampling on the device",
    )
