"""Patch files drafted from proven causes: one template a stack and kind of draft, in templates/patches/<stack>/."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.experiment import load_result
from equiport.experiment.atomic import write_text
from equiport.localize.drafts import Figure
from equiport.stacks.port_classes import PortClasses
from equiport.stages.causes import CauseReport
from equiport.stages.patch_plan import PatchPlan
from equiport.stages.stage3 import LocalisationMetrics

_WIDTH = 116
_MODULES, _WEIGHTS = "modules", "weights"


@dataclass(frozen=True)
class Drafted:
    """What became of the causes: files written, files that were there and stay, and why others have no patch."""

    written: tuple[Path, ...]
    kept: tuple[Path, ...]
    without: tuple[str, ...]


def draft_patches(stage3_file: Path, classes: PortClasses, stack: str, folder: Path) -> Drafted:
    """Write a patch into `folder` for every proven cause that has a draft. A file that is there is left as it is.

    Raises:
        EquiportError: no result of stage 3, nothing proven, or no draft for what is (the remedy in words).
    """
    result = load_result(stage3_file)
    try:
        if result.stage != 3:
            raise EquiportError(f"is a result of stage {result.stage}", where=stage3_file, remedy="Give stage3.json.")
        suspects = LocalisationMetrics.model_validate(result.metrics).suspects
    except ValidationError as error:
        raise EquiportError(
            f"holds no suspects: {error.errors()[0]['msg']}", where=stage3_file, remedy="Run stage 3 again."
        ) from None
    proven = [suspect.cause for suspect in suspects if suspect.cause is not None and suspect.cause.proven]
    if not proven:
        raise EquiportError(
            "no cause is proven, so no patch can be drafted",
            where=stage3_file,
            field="--draft",
            remedy="Compare the first suspect with its source, and write the patch by hand.",
        )
    drafted = write_drafts(proven, classes, stack, folder)
    if not drafted.written and not drafted.kept:
        first, *more = drafted.without
        raise EquiportError(first + (f" (and {len(more)} more)" if more else ""), where=stage3_file, field="--draft")
    return drafted


def write_drafts(causes: Sequence[CauseReport], classes: PortClasses, stack: str, folder: Path) -> Drafted:
    """A patch for every proven cause that has a draft; one for causes that ask for the same."""
    written: list[Path] = []
    kept: list[Path] = []
    without: list[str] = []
    plans: set[PatchPlan] = set()
    for cause in causes:
        lack = why_not(cause, stack)
        if lack:
            without.append(f"{cause.component}: no patch can be drafted: {lack}. Remedy: {_remedy(cause)}")
            continue
        assert cause.patch is not None
        # twice the same would undo itself
        plan = cause.patch.anywhere()
        if plan in plans:
            continue
        plans.add(plan)
        path = folder / f"{_stem(cause)}.py"
        (kept if path.is_file() else written).append(path)
        if not path.is_file():
            write_text(path, patch_text(cause, classes, stack))
    return Drafted(tuple(written), tuple(kept), tuple(without))


def why_not(cause: CauseReport, stack: str) -> str:
    """Why there is no patch for a proven cause; empty where there is one."""
    plan = cause.patch
    if plan is None:
        return f"{cause.winner.kind if cause.winner else 'the cause'} has no inverse that a patch could apply"
    template = _template(stack, plan)
    if template is None:
        return f"the {stack} stack has no template for '{plan.draft.kind}'"
    if template.startswith(_MODULES):
        if "" in plan.targets:
            lost = plan.sources[plan.targets.index("")]
            return f"the mapping names no single module of the port for {lost}"
        if plan.not_called:
            return f"the port does not call {plan.not_called[0]}; the module around it has to"
    return ""


def patch_text(cause: CauseReport, classes: PortClasses, stack: str) -> str:
    """The patch file of a proven cause that `why_not` has nothing against."""
    plan, winner = cause.patch, cause.winner
    assert plan is not None and winner is not None
    template = _template(stack, plan)
    assert template is not None
    stem = _stem(cause)
    story = [
        f"Cause: {winner.says} ({winner.kind}).",
        f"Proof: with that defect the source gives the port's output, R32 {cause.before:.3g} -> {winner.r32:.2g} "
        f"({cause.fixture} weights, {cause.tried} hypotheses tried).",
        f"Remedy: {winner.repair}. Drafted from the proof; run_stage4.py tells whether it suffices.",
    ]
    patterns = [_pattern(path) for path in dict.fromkeys(plan.targets)]
    text = _environment(stack).get_template(template).render(
        heading=f"Corrects {cause.component}: {winner.kind}.",
        story="\n".join(line for part in story for line in textwrap.wrap(_quoted(part), _WIDTH)),
        port=classes.modeling_file.stem,
        inner=classes.inner,
        causal=classes.causal,
        function=f"apply_{stem}",
        flag=f"_patched_{stem}",
        layers=plan.layers,
        target_pattern=patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})",
        sources=_listed(plan.sources),
        targets=_listed([path for path in plan.targets if path and "{i}" not in path]),
        other=plan.other,
        prefix=plan.sources[0].partition(".")[0] + "." if "." in plan.sources[0] else "",
        draft=plan.draft,
        figure=_figure,
    )  # fmt: skip
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"


def _environment(stack: str) -> Environment:
    return Environment(
        loader=FileSystemLoader(content_dir("templates") / "patches" / stack),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _template(stack: str, plan: PatchPlan) -> str | None:
    name = f"{plan.draft.kind.replace(' ', '_')}.py.j2"
    root = content_dir("templates") / "patches" / stack
    return next((f"{kind}/{name}" for kind in (_MODULES, _WEIGHTS) if (root / kind / name).is_file()), None)


def _stem(cause: CauseReport) -> str:
    """`layers.{i}.self_attn`, 'softmax scale' -> `layers_i_self_attn_softmax_scale_patch`."""
    assert cause.winner is not None
    words = re.sub(r"\W+", "_", f"{cause.component} {cause.winner.kind}").strip("_")
    return f"{re.sub(r'_+', '_', words)}_patch"


def _pattern(path: str) -> str:
    return re.escape(path).replace(r"\{i\}", r"(\d+)")


def _listed(names: Sequence[str]) -> str:
    """A tuple as Python text."""
    return f"({', '.join(json.dumps(name) for name in names)}{',' if len(names) == 1 else ''})"


def _quoted(text: str) -> str:
    """Text that may stand in a docstring."""
    return text.replace("\\", "/").replace('"""', "''")


def _figure(value: Figure) -> str:
    """The number as an expression over the port's config."""
    if not value.field:
        return repr(value.value)
    return f"config.{value.field} ** {value.power!r}"


def _remedy(cause: CauseReport) -> str:
    return cause.winner.repair if cause.winner and cause.winner.repair else "compare the suspect with its source"
