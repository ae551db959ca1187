"""The completion gate: the verdict of a whole experiment, and the headline that says how far it reaches."""

from __future__ import annotations

from dataclasses import dataclass

from equiport.audit.dynamic.port_launch import can_check_port
from equiport.audit.experiment import audit_experiment, fresh_parts
from equiport.audit.render import mutation_line
from equiport.audit.report import AuditReport
from equiport.compare.thresholds import Thresholds, load_thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import ExitCode
from equiport.experiment import Experiment, StageResult
from equiport.experiment.hashing import input_name
from equiport.stages.stage7 import TOLERANCE

#: What `write_report` mends by running it.
PORT_NOT_RUN = "the port was not run in limited processes"
REQUIRED = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class Completion:
    """Headline and exit code. `state` is PASS, FAIL, INCONCLUSIVE or INCOMPLETE; `lacks` says what is missing."""

    state: str
    headline: str
    exit_code: ExitCode
    lacks: tuple[str, ...]
    blind_spots: tuple[str, ...]
    audit: AuditReport


def completion(experiment: Experiment) -> Completion:
    """Judge an experiment: PASS only with every required stage there, fresh, unforced and PASS, and the audit clean.

    FAIL names the first failing stage and component, whatever else is missing.
    """
    through = experiment.config.through
    required = [stage for stage in REQUIRED if stage <= through]
    results = {stage: experiment.result(stage) for stage in required}
    patches = patches_in_force(experiment)
    if patches and 2 in results:
        # stage 4 stands for stage 2: the same tests on the patched port
        results[2] = experiment.result(4)
    spots = tuple(
        dict.fromkeys(f"stage {n}: {spot}" for n, result in results.items() if result for spot in result.blind_spots)
    )
    audit = audit_experiment(experiment, patched=bool(patches))
    tail = _tail(experiment, [result for result in results.values() if result], len(spots), audit)
    numbers = {stage: 4 if patches and stage == 2 else stage for stage in required}
    lacks = tuple(lack for stage in required if (lack := _lack(experiment, numbers[stage], results[stage], patches)))
    lacks += _audit_lack(audit) + _not_tried(experiment, required, patched=bool(patches))
    failed = [
        result
        for result in results.values()
        if result and result.verdict is Verdict.FAIL and experiment.freshness(result.stage).fresh
    ]
    if failed:
        first = failed[0]
        headline = f"FAIL at stage {first.stage}{_named(first)}{_component(results, first)}; {tail}"
        return Completion("FAIL", headline, ExitCode.FAIL, lacks, spots, audit)
    if lacks:
        headline = f"INCOMPLETE, {'; '.join(lacks)}; {tail}"
        return Completion("INCOMPLETE", headline, ExitCode.PREREQUISITE, lacks, spots, audit)
    unclear = [result for result in results.values() if result and result.verdict is not Verdict.PASS]
    if unclear:
        named = ", ".join(f"stage {result.stage} {result.verdict.value}" for result in unclear)
        return Completion("INCONCLUSIVE", f"INCONCLUSIVE, {named}; {tail}", ExitCode.INCONCLUSIVE, lacks, spots, audit)
    return Completion("PASS", f"PASS, stages 0-{required[-1]}; {tail}", ExitCode.PASS, lacks, spots, audit)


def _audit_lack(audit: AuditReport) -> tuple[str, ...]:
    found = audit.counting
    if not found:
        return ()
    first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"audit found {first.rule} at {first.file}:{first.line}{more}",)


def _not_tried(experiment: Experiment, required: list[int], *, patched: bool) -> tuple[str, ...]:
    """Run-time checks of the audit that a PASS needs from stage 2 on, and that did not run on these files."""
    if 2 not in required:
        return ()
    parts = fresh_parts(experiment, patched=patched)
    lacks = ("wrong ports were not tried on the tests",) if parts["tests"] is None else ()
    return lacks + ((PORT_NOT_RUN,) if parts["port"] is None and can_check_port(experiment) else ())


def _audited(audit: AuditReport) -> str:
    """The audit's part of the headline, with the number of rules and what was let stand."""
    let = f", {len(audit.suppressed)} suppressed" if audit.suppressed else ""
    ran = f", {mutation_line(audit)}" if audit.dynamic else ""
    return f"audit {'clean' if audit.clean else 'not clean'} ({len(audit.rules)} rules{ran}{let})"


def _named(result: StageResult) -> str:
    where = result.reasons[0] if result.reasons else None
    return f": {where.subject or 'port'}: {where.code}" if where else ""


def _component(results: dict[int, StageResult | None], first: StageResult) -> str:
    """The component that stage 2 found, where an earlier stage failed on the port as a whole."""
    components = results.get(2)
    if first.stage >= 2 or components is None or components.verdict is not Verdict.FAIL or not components.reasons:
        return ""
    return f"; stage 2 finds {components.reasons[0].subject}"


def _lack(experiment: Experiment, stage: int, result: StageResult | None, patches: list[str]) -> str:
    if result is None:
        return f"stage {stage} did not run"
    state = experiment.freshness(stage)
    if not state.fresh:
        return f"stage {stage} is stale ({', '.join(state.changed)} changed)"
    if result.forced:
        return f"stage {stage} was forced past a missing or failed stage"
    if stage in (1, 5, 6, 7) and result.settings.get("patches", []) != patches:
        return f"stage {stage} ran with patches {result.settings.get('patches', [])}, stage 4 with {patches}"
    loose = loosened(experiment, result)
    return f"stage {stage} was judged by other limits than the experiment's ({', '.join(loose)})" if loose else ""


def patches_in_force(experiment: Experiment) -> list[str]:
    """Names of the patches under which the component tests pass, where they fail without; else none."""
    plain, patched = experiment.result(2), experiment.result(4)
    if plain is None or plain.verdict is Verdict.PASS or patched is None or patched.verdict is not Verdict.PASS:
        return []
    return [str(name) for name in patched.settings.get("patches", [])]


def loosened(experiment: Experiment, result: StageResult) -> list[str]:
    """Flags that made a stage easier to pass than the experiment's own limits would; or another thresholds file."""
    file = experiment.config.thresholds
    limits = load_thresholds(file) if file else Thresholds()
    kept = {
        "tau_r": (limits.r_single if result.stage == 2 else limits.tau_r, False),
        "delta": (limits.delta, False),
        "theta": (limits.theta, True),
        "pass_threshold": (limits.match_rate, True),
        "tolerance": (TOLERANCE, False),
    }
    found = []
    for name, (limit, higher_is_stricter) in kept.items():
        given = result.settings.get(name)
        if given is not None and (given < limit if higher_is_stricter else given > limit):
            found.append(f"--{name.replace('_', '-')} {given:g}")
    if file and input_name(file, experiment.root) not in result.inputs:
        found.append(f"without {file.name}")
    elif not file and "--thresholds" in result.command:
        found.append("by a thresholds file that is not the experiment's")
    return found


def _tail(experiment: Experiment, results: list[StageResult], spots: int, audit: AuditReport) -> str:
    where = list(dict.fromkeys(result.backend.headline for result in results if result.backend))
    parts = [_audited(audit), *(where or ["nothing ran"])]
    patches = patches_in_force(experiment)
    if patches:
        parts.append(f"with patches {', '.join(patches)}")
    if experiment.config.thresholds:
        parts.append(f"thresholds of {experiment.config.thresholds.name}")
    if experiment.config.synthetic_weights:
        parts.append("synthetic weights")
    parts.append(f"{spots} blind spots" if spots != 1 else "1 blind spot")
    return "; ".join(parts)
