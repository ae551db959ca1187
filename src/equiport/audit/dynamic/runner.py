"""The limited process: `python -m equiport.audit.dynamic.runner SPEC.json RESULT.json`.

It cuts itself off first, imports the toolkit and what tests stand on, and only then, in forked children, audited code.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equiport.audit.dynamic.contract import JobResult, RunResult, RunResults, RunSpec, RunSpecs
from equiport.audit.dynamic.sandbox import cut_network, limit, refuse

if TYPE_CHECKING:
    from equiport.audit.dynamic.forks import Ended

_TEXT = "text:"
Send = Callable[[dict[str, Any]], None]


def main(spec_file: Path, result_file: Path) -> None:
    """Run every job of every spec and write the results."""
    specs = RunSpecs.model_validate_json(spec_file.read_text(encoding="utf-8")).runs
    network = cut_network()
    limit(max(spec.memory_mb for spec in specs), 4 * sum(spec.seconds for spec in specs))
    _preload(specs)
    results: list[RunResult] = []
    for spec in specs:
        clock = time.monotonic()
        jobs, left = _run(spec, clock)
        seconds = round(time.monotonic() - clock, 3)
        results.append(RunResult(network=network, jobs=jobs, left_out=left, seconds=seconds))
        # written as it grows: a later run that breaks this process takes nothing away
        partial = result_file.with_suffix(".part")
        partial.write_text(RunResults(runs=results).model_dump_json(), encoding="utf-8")
        partial.replace(result_file)


def _preload(specs: Sequence[RunSpec]) -> None:
    """Import what every child needs, so that each of them need not."""
    import torch

    torch.set_num_threads(1)
    for name in ("pytest", "equiport.port.translate_block_test", "equiport.port.translate_world",
                 "equiport.stages.component_fixtures", "equiport.audit.dynamic.session",
                 *dict.fromkeys(name for spec in specs for name in spec.modules)):  # fmt: skip
        with suppress(Exception):
            importlib.import_module(name)


def _run(spec: RunSpec, clock: float) -> tuple[list[JobResult], list[str]]:
    from equiport.audit.dynamic.bugs import fitting_text_bugs
    from equiport.audit.dynamic.forks import Task, run_forked
    from equiport.audit.dynamic.judging import survivors
    from equiport.audit.dynamic.session import result_of

    deadline = clock + spec.seconds
    whole = Task("session", partial(_session, spec, deadline=deadline, only=None))
    jobs: list[JobResult] = []
    left: list[str] = []
    for ended in run_forked([whole], workers=1, seconds=spec.seconds * 1.5, deadline=deadline):
        jobs, left = _collected(ended)
    if not any(job.job == "control" and job.ended == "ok" for job in jobs):
        return jobs, left
    texts = [Path(file).read_text(encoding="utf-8", errors="replace") for file in spec.port_files]
    # what survived may have been computed while the files were imported: once more, wrong from the start
    tasks = [Task(name, partial(_session, spec, deadline=deadline, only=name)) for name in survivors(jobs)]
    tasks += [
        Task(_TEXT + name, partial(_session, spec, deadline=deadline, only=_TEXT + name))
        for name in (() if spec.jobs else fitting_text_bugs(texts)[: spec.most_bugs])
    ]
    again: dict[str, JobResult] = {}
    for ended in run_forked(tasks, workers=spec.workers, seconds=spec.job_seconds, deadline=deadline):
        again[ended.task.name] = result_of(ended)
    left += [task.name for task in tasks if task.name not in again and task.name.startswith(_TEXT)]
    kept = [again.get(job.job, job) if again.get(job.job, job).ended == "ok" else job for job in jobs]
    return [*kept, *(job for name, job in again.items() if name.startswith(_TEXT))], left


def _collected(ended: Ended) -> tuple[list[JobResult], list[str]]:
    jobs = [JobResult.model_validate(line) for line in ended.lines if "job" in line]
    left = [str(line["left_out"]) for line in ended.lines if "left_out" in line]
    if ended.how != "ok":
        said = next((str(line["died"]) for line in ended.lines if "died" in line), f"its process: {ended.how}")
        jobs.append(JobResult(job="collect", ended=ended.how, detail=said))
    return jobs, left


def _session(spec: RunSpec, send: Send, *, deadline: float, only: str | None) -> None:
    """One session; `only`: one job that is in force while the files are imported."""
    from equiport.audit.dynamic.bugs import text_bugs
    from equiport.audit.dynamic.session import JobSession, Limits, prepared, run_session
    from equiport.audit.dynamic.watch import Watch, border
    from equiport.compare.records import RECORDS_ENV
    from equiport.errors import EquiportError

    for path in reversed(spec.paths):
        sys.path.insert(0, path)
    scratch = Path(spec.scratch)
    log = os.open(str(scratch / f"{(only or 'session').replace(':', '-').replace('/', '-')[:60]}.log"),
                  os.O_WRONLY | os.O_CREAT | os.O_TRUNC)  # fmt: skip
    os.dup2(log, 1)
    os.dup2(log, 2)
    records = scratch / f"records-{os.getpid()}.jsonl"
    records.touch()
    os.environ.update({RECORDS_ENV: str(records), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"})
    sys.dont_write_bytecode = True
    edit = None
    if only and only.startswith(_TEXT):
        bug = text_bugs()[only.removeprefix(_TEXT)]

        def edit(text: str) -> str:
            try:
                return bug(text)
            except EquiportError:
                return text

    watch = Watch(spec.port_files, edit)
    border(watch)
    watch.install()
    refuse([scratch])
    limits = Limits(spec.workers if only is None else 1, spec.job_seconds, deadline, spec.most_bugs, tuple(spec.jobs))
    jobs, early = None, None
    if only is not None:
        jobs = ["text" if only.startswith(_TEXT) else only]
        early = prepared(jobs[0], watch)
    plugin = JobSession(watch, _renamed(send, only), limits, jobs, early)
    run_session(spec.files, spec.folder, plugin)


def _renamed(send: Send, only: str | None) -> Send:
    """Results under the name that the runner knows."""

    def sent(line: dict[str, Any]) -> None:
        send({**line, "job": only} if only is not None and "job" in line else line)

    return sent


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
