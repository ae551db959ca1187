"""Run lm_eval over one side and keep every item's score."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.experiment.atomic import write_json
from equiport.stages.bench_config import LmEvalSuite

REMEDY = "Install the extra: pip install 'equiport[eval]' (lm_eval, EleutherAI's lm-evaluation-harness)."


@dataclass(frozen=True)
class Item:
    """One item under one metric: its score (None: no single number) and what it was, to pair it with the other side.

    `answers`: log-likelihoods of the choices, or the generated text.
    """

    score: float | None
    identity: str
    answers: list[Any] = field(default_factory=list, compare=False)
    text: str = ""
    target: str = ""


@dataclass(frozen=True)
class MetricScores:
    """All items of one task (or group of tasks) under one metric and filter, by their place."""

    task: str
    metric: str
    filter: str
    higher_is_better: bool
    chance: float
    items: dict[str, Item]


def installed() -> bool:
    """Whether lm_eval can be imported."""
    return importlib.util.find_spec("lm_eval") is not None


def require_lm_eval() -> None:
    """lm_eval is there.

    Raises:
        EquiportError: it is not.
    """
    if not installed():
        raise EquiportError("lm_eval is not installed", remedy=REMEDY)


def task_folder(suite: LmEvalSuite) -> Path:
    """The local task folder of a suite: its own, or the shipped one."""
    return suite.include_path or content_dir("benchmarks")


def task_files(suite: LmEvalSuite) -> list[Path]:
    """What decides the items of a suite's local tasks."""
    return sorted(path for path in task_folder(suite).rglob("*") if path.suffix in (".yaml", ".json", ".jsonl", ".py"))


def evaluate(lm: Any, suite: LmEvalSuite, limit: int | None, seed: int, output: Path, *, debug: bool) -> Any:
    """lm_eval's result on a suite; results and samples are written into `output`.

    Raises:
        EquiportError: an unknown task, data that is not there, a chat template that is not there, an empty task.
    """
    if suite.use_chat and not lm.tokenizer.chat_template:
        raise EquiportError(
            "the tokenizer has no chat template", field="use_chat", remedy="Set use_chat: false, or add the template."
        )
    with _prepared(suite, debug=debug) as (manager, evaluator):
        try:
            found = evaluator.simple_evaluate(
                model=lm,
                tasks=list(suite.tasks),
                num_fewshot=suite.num_fewshot,
                limit=limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=suite.use_chat,
                task_manager=manager,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except EquiportError:
            raise
        except Exception as error:
            if lm.raised is error or debug:
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise EquiportError(
                f"lm_eval cannot run {', '.join(suite.tasks)}: {type(error).__name__}: {said}",
                remedy="Check the task and its data (nothing is downloaded here); --debug shows the traceback.",
            ) from error
    for task, samples in found["samples"].items():
        write_json(output / f"samples_{task}.json", _plain(samples))
    write_json(output / "results.json", _plain({key: found[key] for key in found if key != "samples"}))
    return found


@contextlib.contextmanager
def _prepared(suite: LmEvalSuite, *, debug: bool) -> Iterator[tuple[Any, Any]]:
    """lm_eval, quiet and offline, in the suite's task folder, with a data cache of its own for local tasks."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")
    import datasets
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    folder, before = task_folder(suite), Path.cwd()
    cache, levels = datasets.config.HF_DATASETS_CACHE, {}
    # lm_eval asks git about the folder, which complains on the screen outside a repository
    asked = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    for name in ("lm_eval", "datasets"):
        logger = logging.getLogger(name)
        levels[name] = logger.level
        if not debug:
            logger.setLevel(logging.CRITICAL)
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    screen = contextlib.nullcontext() if debug else contextlib.redirect_stderr(io.StringIO())
    try:
        with screen, tempfile.TemporaryDirectory(prefix="equiport-eval-") as scratch:
            manager = TaskManager(include_path=str(folder), include_defaults=False)
            if all(task in manager.all_tasks for task in suite.tasks):
                datasets.config.HF_DATASETS_CACHE = Path(scratch)
            else:
                manager = TaskManager(include_path=str(folder))
            unknown = [task for task in suite.tasks if task not in manager.all_tasks]
            if unknown:
                raise EquiportError(
                    f"lm_eval knows no task {unknown[0]!r}",
                    where=folder,
                    field="tasks",
                    remedy="Correct the name, or put its YAML into include_path.",
                )
            os.chdir(folder)  # tasks name their data files relative to themselves
            yield manager, evaluator
    finally:
        os.chdir(before)
        evaluator.get_git_commit_hash = asked
        datasets.config.HF_DATASETS_CACHE = cache
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            datasets.utils.logging.enable_progress_bar()


def scores(found: Any, suite: LmEvalSuite) -> list[MetricScores]:
    """Per-item scores of each task that the suite names; a group's tasks are pooled."""
    members = found.get("group_subtasks") or {}
    out = []
    for name in suite.tasks:
        leaves = _leaves(name, members, found["samples"])
        samples = [sample for leaf in leaves for sample in found["samples"][leaf]]
        kinds = {(metric, sample["filter"]) for sample in samples for metric in sample["metrics"]}
        for metric, kept in sorted(kinds):
            items, guesses = {}, []
            for leaf in leaves:
                for sample in found["samples"][leaf]:
                    if sample["filter"] == kept and metric in sample:
                        items[f"{leaf}/{sample['doc_id']}"] = _item(sample, metric)
                        guesses.append(1 / len(sample["resps"]) if len(sample["resps"]) > 1 else 0.0)
            higher = all(found.get("higher_is_better", {}).get(leaf, {}).get(metric, True) for leaf in leaves)
            chance = sum(guesses) / len(guesses) if guesses else 0.0
            out.append(MetricScores(name, metric, kept, higher, chance, items))
        if not kinds:
            out.append(MetricScores(name, "-", "-", True, 0.0, {}))
    return out


def _leaves(name: str, members: dict[str, list[str]], samples: dict[str, Any]) -> list[str]:
    if name in samples:
        return [name]
    return [leaf for child in members.get(name, []) for leaf in _leaves(child, members, samples)]


def _item(sample: dict[str, Any], metric: str) -> Item:
    value = sample[metric]
    number = float(value) if isinstance(value, (int, float)) or hasattr(value, "item") else None
    return Item(
        score=number,
        identity=f"{sample['doc_hash']} {sample['prompt_hash']} {sample['target_hash']}",
        answers=[_plain(response[0]) for response in sample["resps"]],
        text=str(sample["arguments"][0][0]),
        target=str(sample["target"]),
    )


def _plain(value: Any) -> Any:
    """For JSON: what is no plain value becomes its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def version() -> str:
    """lm_eval's version."""
    return str(getattr(sys.modules.get("lm_eval"), "__version__", "")) or "unknown"
