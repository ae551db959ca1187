"""A patch for a port whose components fail, written by an agent, audited and measured by the toolkit (stage 4)."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from equiport.agents.backend import Access, Job
from equiport.agents.prompts import load_prompt
from equiport.agents.sessions import Sessions, job_key
from equiport.audit.engine import audit_files
from equiport.compare.verdict import Verdict
from equiport.errors import ExitCode
from equiport.experiment import Experiment
from equiport.experiment.atomic import write_text
from equiport.experiment.hashing import port_files
from equiport.port.agent_limits import AgentLimits
from equiport.port.plan_schema import PortPlan, SourceClass
from equiport.port.port_run_units import test_environment
from equiport.port.translate_prompt import fenced, relaunched, source_file
from equiport.port.unit_attempts import Rejection, add_attempt, read_attempts
from equiport.stacks.loading import load_adapter
from equiport.stacks.patches import patch_files
from equiport.stages.stage3 import LocalisationMetrics, Suspect

_FINDINGS = 12


@dataclass(frozen=True)
class Debugging:
    """What a debugging agent is given: the experiment that failed, the port's file, and a folder to write in."""

    experiment: Experiment
    plan: PortPlan
    port: Path
    folder: Path


def wanted(experiment: Experiment) -> bool:
    """Whether a patch may help: components fail, stage 3 has suspects, and nobody has patched yet."""
    components, located = experiment.result(2), experiment.result(3)
    if components is None or located is None or components.verdict is not Verdict.FAIL:
        return False
    return bool(_suspects(experiment)) and not patch_files(experiment.patches)


def debug(
    given: Debugging, sessions: Sessions, limits: AgentLimits, run_stages: Callable[[], ExitCode]
) -> ExitCode | None:
    """Have a patch written until stage 4 passes with it; `run_stages` runs what is stale then. None: no patch helped,
    and none was left behind.

    Raises:
        EquiportError: the model cannot be asked, or a stage cannot run.
    """
    suspects = _suspects(given.experiment)
    name = f"patch_{re.sub(r'[^a-z0-9]+', '_', suspects[0].component.lower()).strip('_')}.py"
    prompt, task = load_prompt("equivalence-debugger"), _task(given, suspects, name)
    access = Access(given.folder, prompt.tools, (name,), _readable(given))
    key = job_key(Job("", task, prompt.text, access, 0.0, 0, model=limits.model))
    attempts = read_attempts(given.folder, key, (name,))
    while len(attempts.rejected) < limits.attempts:
        number = len(attempts.rejected) + 1
        text = task if number == 1 else relaunched(task, number, attempts.rejected[-1].instruction)
        job = Job(
            f"patch, attempt {number}", text, prompt.text, access, limits.unit_usd, limits.turns, limits.timeout,
            model=limits.model,
        )  # fmt: skip
        asyncio.run(sessions.run(job))
        code, why = _judge(given, name, run_stages)
        if code is not None:
            return code
        attempts = add_attempt(given.folder, attempts, Rejection(line=why, instruction=why))
        sessions.say(f"patch, attempt {number}: rejected: {why}")
    return None


def _suspects(experiment: Experiment) -> list[Suspect]:
    located = experiment.result(3)
    return LocalisationMetrics.model_validate(located.metrics).suspects if located and located.metrics else []


def _task(given: Debugging, suspects: list[Suspect], name: str) -> str:
    f, experiment = given.plan.fingerprint, given.experiment
    lines = [
        f"{suspect.rank}. {suspect.component} (source {', '.join(suspect.source_modules)}; port "
        f"{', '.join(suspect.target_modules)}), {suspect.phase}, weights {suspect.fixture}: {suspect.description} "
        f"[{suspect.root_cause}]"
        for suspect in suspects[:_FINDINGS]
    ]
    components = experiment.result(2)
    reasons = [f"{item.subject}: {item.message}" for item in components.reasons[:_FINDINGS]] if components else []
    return "\n".join(
        [
            f"Job: patch the port of {f.architecture}.",
            f"Write {name} in {given.folder.resolve()}.",
            f"The port: {given.port} (in the patch: import {given.port.stem} as port). Its application class is "
            f"{experiment.config.target_causal_class}, its model {experiment.config.target_inner_class}.",
            f"The source: {_source(given)}",
            f"Stage 3 in full: {experiment.result_path(3)}",
            fenced("\n".join(lines), "suspects"),
            fenced("\n".join(reasons), "findings of stage 2"),
        ]
    )


def _source(given: Debugging) -> Path:
    f = given.plan.fingerprint
    return source_file(SourceClass(cls=f.architecture, file=f.source_file, line=1, path=""))


def _readable(given: Debugging) -> tuple[Path, ...]:
    roots = [given.port.parent, given.experiment.results, _source(given).parent]
    return tuple(root.resolve() for root in [*roots, *load_adapter(given.plan.stack).source_roots()])


def _judge(given: Debugging, name: str, run_stages: Callable[[], ExitCode]) -> tuple[ExitCode | None, str]:
    """The stages' exit code with the patch in force, or why it was taken out again."""
    written = given.folder / name
    if not written.is_file():
        return None, f"{name} was not written"
    placed = write_text(given.experiment.patches / name, written.read_text(encoding="utf-8"))
    audit = audit_files([placed, *port_files(given.port)], given.experiment.root)
    findings = [item for item in audit.counting if Path(item.file).name == name]
    if findings:
        _out(placed)
        first = findings[0]
        return None, f"the audit refuses the patch: {first.rule} at line {first.line}: {first.message}"
    fault = _applied(given)
    if fault:
        _out(placed)
        return None, fault
    code = run_stages()
    result = given.experiment.result(4)
    if result is not None and result.verdict is Verdict.PASS:
        return code, ""
    said = "; ".join(f"{item.code} {item.subject}: {item.message}" for item in result.reasons[:6]) if result else ""
    _out(placed)
    run_stages()
    return None, f"stage 4 does not pass with it: {said or 'it did not run'}"


def _applied(given: Debugging) -> str:
    """Why the patches cannot be applied; tried in a process of its own."""
    text = (
        "import sys; from pathlib import Path\n"
        "from equiport.errors import EquiportError\n"
        "from equiport.stacks.loading import load_adapter; from equiport.stacks.patches import apply_patches\n"
        "try:\n    apply_patches(load_adapter(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))\n"
        "except EquiportError as error:\n    print(error.line()); sys.exit(1)\n"
    )
    command = [sys.executable, "-c", text, given.plan.stack, str(given.port), str(given.experiment.patches)]
    environment = test_environment(given.port.parent, given.port.parent)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
    return "" if ended.returncode == 0 else said[-1].strip() if said else "the patch cannot be applied"


def _out(placed: Path) -> None:
    """Take a patch out of force; the copy in the agent's folder stays for it to correct."""
    placed.unlink()
    shutil.rmtree(placed.parent / "__pycache__", ignore_errors=True)
