"""One row a public port: what the CPU stages say of it; the table as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from equiport.audit.experiment import audit_experiment
from equiport.bench.port_check import PortCheck
from equiport.experiment import Experiment, StageResult
from equiport.report import completion
from equiport.stages.causes import CauseReport
from equiport.stages.stage3 import LocalisationMetrics, Suspect

#: What a command that left no experiment says by its exit code.
ENDED = {2: "NOT RUN", 3: "QUESTION OPEN"}


class PortVerdict(BaseModel):
    """`port`: its folder in the tree and the file. `tier`: what the results say ran; empty where nothing did.

    `stages`: verdict by stage; `verdict` is the whole's. `component`: the first bad one; `cause`: what was proven of
    it, else what came nearest. `r32`: the largest of any component; `r_logits`: pooled centred R of teacher-forced
    decoding. `decode`, `prefill`: relative L2 of fp32 logits, of a quick check. `apart`: components that do work on the
    other side of a border. `audit`: findings that count. `said`: the headline, or why nothing ran.
    """

    model_config = ConfigDict(frozen=True)

    port: str
    kind: str
    model_type: str
    verdict: str
    tier: str = ""
    stages: dict[str, str] = {}
    component: str = ""
    cause: str = ""
    proven: bool = False
    r32: float | None = None
    r_logits: float | None = None
    decode: float | None = None
    prefill: float | None = None
    apart: tuple[str, ...] = ()
    audit: tuple[str, ...] = ()
    seconds: float = 0.0
    said: str = ""


class PortTable(BaseModel):
    """All rows. `tree`: commit of the tree, or the digest of its ports; `versions` of torch and transformers."""

    tree: str
    versions: dict[str, str]
    rows: tuple[PortVerdict, ...]


def read_verdict(row: PortVerdict, experiment: Experiment) -> PortVerdict:
    """`row`, completed from what the experiment's results hold.

    Raises:
        EquiportError: a result is damaged.
    """
    found = {stage: result for stage in range(8) if (result := experiment.result(stage)) is not None}
    components, logits, located = found.get(2), found.get(5), found.get(3)
    parts = components.metrics.get("rows", []) if components else []
    paths = logits.metrics.get("paths", []) if logits else []
    stamp = next((result.backend for result in found.values() if result.backend), None)
    judged = completion(experiment)
    suspect = _suspect(located)
    return row.model_copy(
        update={
            "verdict": judged.state,
            "said": judged.headline,
            "tier": stamp.kind if stamp else "",
            "stages": {str(stage): result.verdict.value for stage, result in found.items()},
            "component": _place(suspect) if suspect else _first_reason(found),
            "cause": _cause(suspect.cause, suspect.description) if suspect else "",
            "proven": bool(suspect and suspect.cause and suspect.cause.proven),
            "r32": max((part["r32_worst"] for part in parts if part["r32_worst"] is not None), default=None),
            "r_logits": next((path["r_centred"] for path in paths if path["path"] == "decode"), None),
            "audit": tuple(sorted({finding.rule for finding in audit_experiment(experiment).counting})),
        }
    )


def checked_verdict(row: PortVerdict, check: PortCheck) -> PortVerdict:
    """`row`, completed from a quick check."""
    loads = bool(check.structure or check.failing or check.decode is not None or check.open_points)
    proven = next((one for one in check.causes if one.proven), next(iter(check.causes), None))
    named = proven.component if proven else (check.failing or [""])[0]
    layer = f" (layer {proven.layer})" if proven and proven.layer is not None else ""
    cause = _cause(proven, "") if proven else ""
    first = next(iter([*check.structure, *check.components, *check.open_points]), check.said)
    return row.model_copy(
        update={
            "verdict": check.verdict.value if loads else ENDED[2],
            "tier": check.tier,
            "component": check.structure[0].split(":")[0] if check.structure else named + layer,
            "cause": "; ".join(text for text in (named + layer if check.structure else "", cause) if text),
            "proven": bool(proven and proven.proven),
            "r32": check.r32,
            "decode": check.decode,
            "prefill": check.prefill,
            "apart": tuple(check.apart),
            "said": "; ".join(text for text in (first, check.said if first != check.said else "") if text),
        }
    )


def _suspect(located: StageResult | None) -> Suspect | None:
    """The first suspect with a proven cause, else the first."""
    if located is None:
        return None
    suspects = LocalisationMetrics.model_validate(located.metrics).suspects
    proven = (one for one in suspects if one.cause is not None and one.cause.proven)
    return next(proven, next(iter(suspects), None))


def _place(suspect: Suspect) -> str:
    return suspect.component + (f" (layer {suspect.layer})" if suspect.layer is not None else "")


def _first_reason(found: Mapping[int, StageResult]) -> str:
    for stage, result in sorted(found.items()):
        if result.verdict.value != "PASS" and result.reasons:
            first = result.reasons[0]
            return f"stage {stage}: {first.code} {first.subject}".strip()
    return ""


def _cause(cause: CauseReport | None, otherwise: str) -> str:
    if cause is None:
        return otherwise
    if cause.proven and cause.winner is not None:
        other = f"; {cause.elsewhere}" if cause.elsewhere else ""
        return f"{cause.winner.says} ({cause.winner.kind}; R32 {cause.before:.2g} -> {cause.winner.r32:.2g}){other}"
    near = f"; nearest: {cause.runner_ups[0].says}" if cause.runner_ups else ""
    return f"not proven{near}"


def lines_of(rows: Iterable[PortVerdict], *, head: bool = True) -> list[str]:
    """The table as text, one line a port."""
    form = "{:<38} {:<12} {:>7} {:>8} {:>8} {:>8}  {}"
    names = ("port", "verdict", "seconds", "R32", "R logits", "decode", "first bad component, cause")
    lines = [form.format(*names)] if head else []
    for row in rows:
        figures = (_figure(row.r32, ".1e"), _figure(row.r_logits, ".3g"), _figure(row.decode, ".1e"))
        told = f"{row.component}: {row.cause}" if row.component and row.cause else row.component or row.said
        lines.append(form.format(row.port[:38], row.verdict, f"{row.seconds:.0f}", *figures, told))
    return lines


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
