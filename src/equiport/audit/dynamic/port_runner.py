"""The limited process that runs a whole port on tiny weights: `python -m ...port_runner SPEC.json RESULT.json`.

Each job is a child of its own: as it is, again, with NaN in fresh memory, and with the reference's code blocked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from equiport.audit.dynamic.contract import JobResult, RunResult
from equiport.audit.dynamic.sandbox import cut_network, limit, refuse

JOBS = ("plain", "elsewhere", "poison", "isolated")
_TOLERANCE = 1e-6
_PROMPTS, _STEPS = (11, 6), 2


class PortSpec(BaseModel):
    """A port and the tiny model's folder that it is run on. Paths are absolute; `patches` may be empty."""

    model_config = ConfigDict(frozen=True)

    modeling_file: str
    inner: str
    causal: str
    config: str
    stack: str
    weights: str
    patches: str = ""
    scratch: str
    seconds: float
    memory_mb: int = 8192
    seed: int = 42


def main(spec_file: Path, result_file: Path) -> None:
    """Run every job and compare what they gave."""
    clock = time.monotonic()
    spec = PortSpec.model_validate_json(spec_file.read_text(encoding="utf-8"))
    network = cut_network()
    limit(spec.memory_mb, 4 * spec.seconds)
    from equiport.audit.dynamic.forks import Task, run_forked
    from equiport.audit.dynamic.session import result_of

    _preload()
    tasks = [Task(name, partial(_sent, spec, name)) for name in JOBS]
    ended = run_forked(tasks, workers=2, seconds=spec.seconds, deadline=clock + spec.seconds)
    jobs = [result_of(item) for item in ended]
    result = RunResult(
        network=network, jobs=[*jobs, *_compared(Path(spec.scratch), jobs)], seconds=round(time.monotonic() - clock, 3)
    )
    result_file.write_text(result.model_dump_json(), encoding="utf-8")


def _preload() -> None:
    import torch

    import equiport.stacks.loading
    import equiport.trace.whole  # noqa: F401

    torch.set_num_threads(1)


def _sent(spec: PortSpec, name: str, send: Callable[[dict[str, Any]], None]) -> None:
    send(_job(spec, name))


def _job(spec: PortSpec, name: str) -> dict[str, Any]:
    import torch

    from equiport.audit.dynamic.conditions import apply_condition
    from equiport.audit.dynamic.probe import Probe
    from equiport.audit.dynamic.watch import Watch

    clock = time.monotonic()
    scratch = Path(spec.scratch)
    log = os.open(str(scratch / f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = str(scratch)
    sys.dont_write_bytecode = True
    if name == "elsewhere":
        # another place, another time of day, other random numbers
        os.chdir(scratch)
        torch.manual_seed(20_011)
    probe = Probe()
    watch = Watch([spec.modeling_file])
    if name == "poison":
        apply_condition("poison", watch)
    if name == "isolated":
        watch.mode = Guarded(probe)
        watch.install()
    refuse([scratch])
    first, again = _logits(spec)
    torch.save([first, again], scratch / f"{name}.pt")
    return JobResult(
        job=name, facts=probe.facts, port_raised=watch.port_raised, seconds=round(time.monotonic() - clock, 3)
    ).model_dump()


class Guarded:
    """Blocks the reference's code while the port runs, and does nothing else."""

    def __init__(self, probe: Any) -> None:
        self.call: Callable[..., Any] = probe.guarded


def _logits(spec: PortSpec) -> tuple[Any, Any]:
    """fp32 logits of a ragged batch by prefill and decode, and the same again after another batch."""
    from equiport.fixtures.folder import read_config
    from equiport.fixtures.tokens import draw_batch, special_ids
    from equiport.stacks.loading import load_adapter
    from equiport.stacks.patches import apply_patches
    from equiport.stacks.port_classes import PortClasses
    from equiport.trace.whole import ShapeRun, port_logits

    adapter = load_adapter(spec.stack)
    classes = PortClasses(Path(spec.modeling_file), spec.inner, spec.causal, spec.config)
    adapter.init_distributed(1)
    if spec.patches:
        apply_patches(adapter, Path(spec.modeling_file), Path(spec.patches))
    config = read_config(Path(spec.weights))
    batch = draw_batch(config["vocab_size"], _PROMPTS, _STEPS, spec.seed, special_ids(config))
    length = max(batch.max_length, 64)
    found = port_logits(adapter, classes, Path(spec.weights), ShapeRun("audit", batch, length))
    return [found.decode, found.prefill], [found.again]


def _compared(scratch: Path, jobs: list[JobResult]) -> list[JobResult]:
    """Facts from the differences between the jobs' logits."""
    import torch

    from equiport.audit.dynamic.structures import distance

    files = {name: scratch / f"{name}.pt" for name in JOBS}
    stored = {name: torch.load(file, weights_only=True) for name, file in files.items() if file.is_file()}
    if "plain" not in stored:
        return []
    plain, again = stored["plain"]
    facts: list[tuple[str, str, str]] = []
    gap = distance(again, plain[:1])
    if gap > _TOLERANCE:
        facts.append(("not-deterministic", "", f"logits differ by {gap:.2g} when the same batch comes again"))
    for name, rule, said in (
        ("elsewhere", "not-deterministic", "in another process, folder and random state"),
        ("poison", "reads-uninitialised", "when fresh memory is full of NaN"),
    ):
        gap = distance(stored[name][0], plain) if name in stored else 0.0
        if gap > _TOLERANCE:
            facts.append((rule, "", f"logits differ by {gap:.2g} {said}"))
    return [JobResult(job="compared", facts=facts)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
