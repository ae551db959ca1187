"""What the audit's process and the limited one that runs audited code say to each other."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

#: Each must be noticed by every test that runs the port.
BASIC = ("noise", "zeros", "constant", "scaled")
#: Attempts with numbers that the author of the test did not see; one that passes is enough.
SEEDS, SHAPES = ("seed-1", "seed-2", "seed-3"), ("shape-batch", "shape-length")


class RunSpec(BaseModel):
    """One run: the test files, the port's files, and the limits. Paths are absolute. `jobs`: empty means all."""

    model_config = ConfigDict(frozen=True)

    files: list[str]
    port_files: list[str]
    folder: str
    paths: list[str] = Field(default_factory=list, description="put on sys.path first")
    modules: list[str] = Field(default_factory=list, description="modules of the toolkit's world, imported beforehand")
    scratch: str
    seconds: float
    job_seconds: float = 60.0
    memory_mb: int = 8192
    workers: int = 2
    most_bugs: int = 6
    jobs: list[str] = Field(default_factory=list)


class RunSpecs(BaseModel):
    """Several runs in one process, one after the other: its libraries are loaded once."""

    model_config = ConfigDict(frozen=True)

    runs: list[RunSpec]


class TestOutcome(BaseModel):
    """One test in one job: its outcome, how often the port was called from outside in it, and the last line."""

    model_config = ConfigDict(frozen=True)
    __test__ = False

    outcome: str
    calls: int = 0
    detail: str = ""


class JobResult(BaseModel):
    """One job. `ended`: ok, timeout or died. `facts` are sentences of the checks that only watch, by rule id.

    `applied`: whether there was something to change; `applied_in`: of mutants, the tests in which there was;
    `port_raised`: an exception left the port.
    """

    model_config = ConfigDict(frozen=True)

    job: str
    ended: str = "ok"
    tests: dict[str, TestOutcome] = Field(default_factory=dict)
    facts: list[tuple[str, str, str]] = Field(default_factory=list, description="(rule, test, sentence)")
    bugs: list[str] = Field(default_factory=list)
    applied: bool = True
    applied_in: list[str] = Field(default_factory=list)
    port_raised: bool = False
    seconds: float = 0.0
    detail: str = ""


class RunResult(BaseModel):
    """All jobs of a run. `network`: how it was cut off. `left_out`: jobs for which no time was left."""

    model_config = ConfigDict(frozen=True)

    network: str = ""
    jobs: list[JobResult] = Field(default_factory=list)
    left_out: list[str] = Field(default_factory=list)
    seconds: float = 0.0


class RunResults(BaseModel):
    """A result for each run, as far as the process came."""

    model_config = ConfigDict(frozen=True)

    runs: list[RunResult]
