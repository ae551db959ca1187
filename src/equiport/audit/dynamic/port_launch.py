"""The run-time checks of an experiment's port, and where their results are kept between stages and reports."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport import __version__
from equiport.audit.dynamic import rules
from equiport.audit.dynamic.contract import JobResult, RunResult
from equiport.audit.dynamic.findings import Places, dynamic_report, findings_of
from equiport.audit.dynamic.launch import DynamicOptions, Group, groups, run_groups, start_limited
from equiport.audit.dynamic.port_runner import JOBS, PortSpec
from equiport.audit.report import DynamicReport, Finding
from equiport.audit.work import read_work
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json, write_json
from equiport.experiment.hashing import port_files, sha256

STORE_NAME = "audit_dynamic.json"
_MODULE = "equiport.audit.dynamic.port_runner"
_BY_ID = {rule.id: rule for rule in rules.DYNAMIC_RULES}


class Part(BaseModel):
    """One half: of the tests (stage 2 makes it) or of the port (the report makes it)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    report: DynamicReport
    findings: list[Finding] = Field(default_factory=list)


class Store(BaseModel):
    """results/audit_dynamic.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tests: Part | None = None
    port: Part | None = None


def read_store(experiment: Experiment) -> Store:
    """What is stored; an empty store where there is nothing, or nothing that can be read."""
    path = experiment.results / STORE_NAME
    if not path.is_file():
        return Store()
    try:
        return Store.model_validate(read_json(path, remedy="Run equiport validate again."))
    except ValidationError:
        return Store()


def keep(experiment: Experiment, **parts: Part) -> None:
    """Store one half and leave the other."""
    write_json(experiment.results / STORE_NAME, read_store(experiment).model_copy(update=parts))


def key_of(experiment: Experiment, kind: str, patches: bool) -> str:
    """Content of what a half rests on: the port, its tests or its tiny weights, patches, this version."""
    digest = hashlib.sha256(f"{kind} {__version__} {sys.version} {patches}".encode())
    files = [*port_files(experiment.config.target_modeling_file)]
    if kind == "tests":
        files += sorted(experiment.tests.rglob("*.py"))
    if patches:
        files += sorted(experiment.patches.rglob("*.py"))
    for file in files:
        if file.is_file():
            digest.update(f"{file.name} {sha256(file)}".encode())
    return digest.hexdigest()


def tiny_weights(experiment: Experiment) -> Path | None:
    """The folder of a tiny model's drawn weights that stage 2 left."""
    found = sorted((experiment.root / "fixtures").glob("perturbed-*/config.json"))
    return found[0].parent if found else None


def can_check_port(experiment: Experiment) -> bool:
    """Whether there are tiny weights to run the port on, and one rank suffices."""
    return tiny_weights(experiment) is not None and experiment.config.tp_degree == 1


def check_port(experiment: Experiment, *, patches: bool, seconds: float = 120.0) -> Part | None:
    """Run the port in limited processes; None where there is nothing to run it on, or it needs several ranks."""
    config, weights = experiment.config, tiny_weights(experiment)
    if weights is None or not can_check_port(experiment):
        return None
    from equiport.stacks.port_classes import find_port_classes

    causal = config.target_causal_class or find_port_classes(config.target_modeling_file).causal or ""
    with tempfile.TemporaryDirectory(prefix="equiport-audit-") as place:
        scratch = Path(place).resolve()
        spec = PortSpec(
            modeling_file=str(config.target_modeling_file.absolute()),
            inner=config.target_inner_class,
            causal=causal,
            config=config.target_config_class,
            stack=config.target_stack,
            weights=str(weights.absolute()),
            patches=str(experiment.patches.absolute()) if patches else "",
            scratch=str(scratch),
            seconds=seconds,
        )
        text, said = start_limited(_MODULE, spec.model_dump_json(), scratch, seconds * 1.5 + 20.0)
    key = key_of(experiment, "port", patches)
    try:
        run = RunResult.model_validate_json(text)
    except ValidationError:
        run = RunResult(jobs=[JobResult(job="plain", ended="died", detail=said)])
    return Part(report=dynamic_report(run, key), findings=_findings(experiment, run))


def _findings(experiment: Experiment, run: RunResult) -> list[Finding]:
    file = experiment.config.target_modeling_file
    places = Places(file.parent, experiment.root)
    found = [
        places.finding(rules.RUN_BROKEN, file.name, f"{item.job}: {item.detail or item.ended}")
        for item in run.jobs
        if item.ended != "ok"
    ]
    missing = [name for name in JOBS if not any(item.job == name for item in run.jobs)]
    if missing:
        found.append(places.finding(rules.RUN_BROKEN, file.name, f"{', '.join(missing)}: no time was left"))
    for item in run.jobs:
        found += [places.finding(_BY_ID[rule], file.name, said) for rule, _, said in item.facts]
    return found


def check_tests(
    experiment: Experiment, files: Sequence[Path], options: DynamicOptions
) -> tuple[RunResult, list[Finding]]:
    """Run the given test files of an experiment with wrong ports; stored results are spoilt like computed ones."""
    everything = [*port_files(experiment.config.target_modeling_file), *sorted(experiment.tests.rglob("*.py"))]
    found = groups(read_work(list(dict.fromkeys(everything)), experiment.root))
    wanted = {file.absolute() for file in files}
    for group in found:
        tests = tuple(path for path in group.tests if path in wanted)
        if tests:
            chosen = Group(group.folder, tests, group.port_files, group.paths, group.families, group.others)
            run = run_groups([chosen], options)[0]
            return run, findings_of(run, [path.name for path in tests], Places(group.folder, experiment.root))
    return RunResult(), []
