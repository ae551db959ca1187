"""PORT_PLAN.md from the plan."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equiport.content import content_dir
from equiport.experiment.atomic import write_text
from equiport.port.fingerprint import BlockContract, TensorSpec
from equiport.port.plan_schema import PortPlan

PLAN_PAGE = "PORT_PLAN.md"


def write_plan_page(folder: Path, plan: PortPlan) -> Path:
    """Write PORT_PLAN.md into `folder`.

    Raises:
        EquiportError: the template is missing or the folder is not writable.
    """
    templates = Environment(
        loader=FileSystemLoader(content_dir("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(cell=_cell, contract=_contract)
    text = templates.get_template("PORT_PLAN.md.j2").render(plan=plan, f=plan.fingerprint)
    return write_text(folder / PLAN_PAGE, re.sub(r"\n{3,}", "\n\n", text))


def _cell(value: object) -> str:
    """Text for a Markdown table cell, shortened."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    return text if len(text) <= 160 else f"{text[:157]}..."


def _contract(contract: BlockContract) -> str:
    def tensors(specs: tuple[TensorSpec, ...]) -> str:
        return ", ".join(f"{spec.name} [{', '.join(spec.shape)}] {spec.dtype}" for spec in specs) or "none"

    return f"takes {tensors(contract.inputs)}; gives {tensors(contract.outputs)}"
