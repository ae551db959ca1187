"""The README that a port is handed over with: what it is and how it was made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from equiport.content import content_dir
from equiport.port.plan_schema import PortPlan
from equiport.port.recipes import environment, load_recipes
from equiport.stacks.port_classes import PortClasses


def readme(
    plan: PortPlan, port: Path, classes: PortClasses, deviations: Iterable[str], by_agent: Iterable[str] = ()
) -> str:
    """Markdown from `templates/scaffold/<stack>/README.md.j2`. `port` is named relative to its folder's parent;
    `by_agent`: blocks that no recipe made."""
    blocks = list(dict.fromkeys(item.block for item in plan.substitutions))
    summaries = {recipe.block: recipe.summary for recipe in load_recipes(plan.stack, blocks)}
    summaries.update(dict.fromkeys(by_agent, "translated by an agent; its unit's tests and card lie beside the port"))
    template = (content_dir("templates") / "scaffold" / plan.stack / "README.md.j2").read_text(encoding="utf-8")
    text = (
        environment()
        .from_string(template)
        .render(
            f=plan.fingerprint,
            stack=plan.stack,
            module=port.stem,
            file=f"{port.parent.name}/{port.name}",
            classes=classes,
            blocks=[(block, summaries.get(block, "")) for block in blocks],
            deviations=list(deviations),
        )
    )
    return text.rstrip("\n") + "\n"
