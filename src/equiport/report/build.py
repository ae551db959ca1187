"""EQUIVALENCE_REPORT.md, and the same as one self-contained HTML page."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel, ValidationError

from equiport import __version__
from equiport.audit.dynamic.port_launch import check_port, keep
from equiport.audit.experiment import write_audit
from equiport.audit.report import AUDIT_NAME
from equiport.content import content_dir
from equiport.errors import EquiportError, ExitCode
from equiport.experiment import Experiment, StageResult
from equiport.experiment.atomic import write_json, write_text
from equiport.experiment.config import CONFIG_NAME
from equiport.experiment.hashing import sha256
from equiport.report.advisory import read_advisory
from equiport.report.completion import PORT_NOT_RUN, Completion, completion, patches_in_force
from equiport.stages.stage0 import StructureMetrics
from equiport.stages.stage1 import SmokeMetrics
from equiport.stages.stage2 import ComponentMetrics
from equiport.stages.stage3 import LocalisationMetrics
from equiport.stages.stage4 import PatchMetrics
from equiport.stages.stage7 import DownstreamMetrics
from equiport.stages.teacher_forced import TeacherForcedMetrics

_STAGES = {0: "structure", 1: "smoke", 2: "components", 3: "localisation", 4: "patches", 5: "end to end",
           6: "distributions", 7: "downstream"}  # fmt: skip
STAMP_NAME = "report.json"


@dataclass(frozen=True)
class WrittenReport:
    """Where the report is and what it says."""

    path: Path
    headline: str
    exit_code: ExitCode


def write_report(experiment: Experiment) -> WrittenReport:
    """Write the Markdown and HTML reports and results/report.json, which `--verify` checks.

    Raises:
        EquiportError: a result file is damaged.
    """
    judged = completion(experiment)
    if judged.lacks == (PORT_NOT_RUN,) and judged.state == "INCOMPLETE":
        # the last thing that a PASS needs, and the only one that costs seconds
        part = check_port(experiment, patches=bool(patches_in_force(experiment)))
        if part is not None:
            keep(experiment, port=part)
            judged = completion(experiment)
    audit = write_audit(experiment, judged.audit)
    results = {stage: result for stage in _STAGES if (result := experiment.result(stage))}
    templates = Environment(
        loader=FileSystemLoader(content_dir("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(figure=_figure, cell=_cell)
    text = templates.get_template("report.md.j2").render(**_values(experiment, judged, results))
    text = re.sub(r"\n{3,}", "\n\n", text)
    path = write_text(experiment.report_file, text)
    page = templates.get_template("report.html.j2").render(title=judged.headline, body=_html(text, experiment.root))
    write_text(path.with_suffix(".html"), page)
    write_json(
        experiment.results / STAMP_NAME,
        {
            "tool_version": __version__,
            "state": judged.state,
            "headline": judged.headline,
            "report": sha256(path),
            "page": sha256(path.with_suffix(".html")),
            "config": sha256(experiment.root / CONFIG_NAME),
            "results": {
                **{f"stage{stage}.json": sha256(experiment.result_path(stage)) for stage in results},
                AUDIT_NAME: sha256(audit),
            },
        },
    )
    return WrittenReport(path, judged.headline, judged.exit_code)


def _values(experiment: Experiment, judged: Completion, results: dict[int, StageResult]) -> dict[str, Any]:
    def metrics(stage: int, model: type[BaseModel]) -> Any:
        result = results.get(stage)
        try:
            return model.model_validate(result.metrics) if result and result.metrics else None
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in ("metrics", *first["loc"]))
            raise EquiportError(
                first["msg"], where=experiment.result_path(stage), field=field, remedy="Run the stage again."
            ) from None

    components = metrics(2, ComponentMetrics)
    structure = metrics(0, StructureMetrics)
    localisation = metrics(3, LocalisationMetrics)
    plots = [*(components.plots if components else []), *_plots(metrics(5, TeacherForcedMetrics))]
    plots += [plot for run in localisation.traced.runs for plot in run.plots] if localisation else []
    hashes: dict[str, str] = {}
    for result in results.values():
        hashes.update(result.inputs)
    return {
        "config": experiment.config,
        "judged": judged,
        "audit": judged.audit,
        "advisory": read_advisory(experiment),
        "names": _STAGES,
        "results": results,
        "stages": [(stage, results.get(stage)) for stage in _STAGES],
        "structure": structure,
        "smoke": metrics(1, SmokeMetrics),
        "components": components,
        "patching": metrics(4, PatchMetrics),
        "localisation": localisation,
        "end_to_end": metrics(5, TeacherForcedMetrics),
        "distribution": metrics(6, TeacherForcedMetrics),
        "downstream": metrics(7, DownstreamMetrics),
        "plots": [plot for plot in plots if (experiment.root / plot).is_file()],
        "hashes": hashes,
        "version": __version__,
        "exp_dir": experiment.root.name,
    }


def _plots(metrics: TeacherForcedMetrics | None) -> list[str]:
    return metrics.plots if metrics else []


def _figure(value: float | str | None) -> str:
    """Three significant digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{float(value):.3g}"


def _cell(text: object) -> str:
    """Text for a Markdown table cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def _html(text: str, root: Path) -> str:
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def inline(match: re.Match[str]) -> str:
        file = root / match.group(1)
        if not file.is_file():
            return match.group(0)
        return f'src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"'

    return re.sub(r'src="([^"]+\.png)"', inline, body)
