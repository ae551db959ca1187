"""bench_config.yaml: what stage 7 evaluates, in the format of seed 003."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport.compare.gates_downstream import PublishedScore
from equiport.errors import EquiportError
from equiport.experiment.atomic import write_text

FILE_NAME = "bench_config.yaml"
SHIPPED_TASKS = ("equiport_agreement", "equiport_kinds")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_Name = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(_Strict):
    """The port (FILE:CLASS twice) and its model. Relative paths start at the config's folder."""

    model_class: _Name
    config_class: _Name
    model_path: Path
    compiled_model_path: Path | None = None
    tp_degree: int = Field(default=1, ge=1)


class LmEvalSuite(_Strict):
    """Tasks that run together. `include_path`: a local task folder (else the shipped one, then lm_eval's own).

    `limit`: items a task (absent: all). `published`: scores reached elsewhere, by task, used where no baseline runs.
    """

    tasks: list[_Name] = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1, strict=True)
    use_chat: bool = Field(default=False, strict=True)
    num_fewshot: int | None = Field(default=None, ge=0, strict=True)
    include_path: Path | None = None
    published: dict[str, PublishedScore] = Field(default_factory=dict)


class Benchmarks(_Strict):
    """Suites by name; the seed's is called `accuracy`."""

    lm_eval: dict[str, LmEvalSuite] = Field(min_length=1)


class BenchConfig(_Strict):
    """The whole file."""

    model: ModelSection
    benchmarks: Benchmarks
    run_hf_baseline: bool = Field(default=True, strict=True)


def load_bench_config(path: Path) -> BenchConfig:
    """Read and validate; paths in it become absolute.

    Raises:
        EquiportError: missing, no YAML, a bad field (named), a repeated task, or a task folder that is not there.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EquiportError(
            "no such file", where=path, field="--bench-config", remedy="Write one, or run equiport validate."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EquiportError(f"is no YAML: {error}", where=path, remedy="Correct the file.") from None
    except OSError as error:
        raise EquiportError(f"cannot be read: {error.strerror}", where=path, field="--bench-config") from None
    try:
        config = BenchConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise EquiportError(first["msg"], where=path, field=field, remedy="Correct this field.") from None
    return _resolved(config, path)


def _resolved(config: BenchConfig, path: Path) -> BenchConfig:
    base = path.resolve().parent

    def absolute(given: Path) -> Path:
        return given if given.is_absolute() else base / given

    model = config.model
    compiled = model.compiled_model_path
    section = model.model_copy(
        update={
            "model_class": str(absolute(Path(model.model_class))),
            "config_class": str(absolute(Path(model.config_class))),
            "model_path": absolute(model.model_path),
            "compiled_model_path": absolute(compiled) if compiled else None,
        }
    )
    seen: set[str] = set()
    suites = {}
    for name, suite in config.benchmarks.lm_eval.items():
        field = f"benchmarks.lm_eval.{name}"
        twice = [task for number, task in enumerate(suite.tasks) if task in seen or task in suite.tasks[:number]]
        if twice:
            raise EquiportError(f"{twice[0]} is named twice", where=path, field=f"{field}.tasks", remedy="Drop one.")
        seen.update(suite.tasks)
        unknown = [task for task in suite.published if task not in suite.tasks]
        if unknown:
            raise EquiportError(
                f"{unknown[0]} is none of its tasks", where=path, field=f"{field}.published", remedy="Correct the name."
            )
        folder = absolute(suite.include_path) if suite.include_path else None
        if folder is not None and not folder.is_dir():
            raise EquiportError(
                f"no such folder: {folder}", where=path, field=f"{field}.include_path", remedy="Correct the path."
            )
        suites[name] = suite.model_copy(update={"include_path": folder})
    return config.model_copy(update={"model": section, "benchmarks": Benchmarks(lm_eval=suites)})


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def write_bench_config(folder: Path, model: Path, port: Path, causal: str, config: str, tp_degree: int = 1) -> Path:
    """Write a bench_config.yaml with the shipped tasks into an experiment's folder."""
    port = port.absolute()
    section: dict[str, object] = {
        "model_class": f"{port}:{causal}",
        "config_class": f"{port}:{config}",
        "model_path": str(model.absolute()),
    }
    if tp_degree != 1:
        section["tp_degree"] = tp_degree
    content = {
        "model": section,
        "benchmarks": {"lm_eval": {"accuracy": {"tasks": list(SHIPPED_TASKS), "use_chat": False}}},
        "run_hf_baseline": True,
    }
    head = (
        "# What stage 7 evaluates. limit: N evaluates the first N items a task; include_path: a task folder of yours.\n"
    )
    return write_text(folder / FILE_NAME, head + yaml.safe_dump(content, sort_keys=False))
