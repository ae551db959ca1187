"""A tiny Llama with a tokenizer, and tasks on which it is right: their answers are what it prefers in fp32."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from worlds import CAUSAL, CONFIG, World

from equiport.reference.model import load_reference

WORDS = [f"w{number}" for number in range(128)]


@dataclass(frozen=True)
class Downstream:
    """A world with a tokenizer in its model folder and a task folder."""

    world: World

    @property
    def tasks(self) -> Path:
        return self.world.root / "tasks"

    @property
    def output(self) -> Path:
        return self.world.root / "out"

    def config(self, *, write: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **suite: Any) -> Path:
        """bench_config.yaml of the world's port; `suite`, `model` and `write` change or (None) drop fields."""
        port = self.world.port
        section = {"model_class": f"{port}:{CAUSAL}", "config_class": f"{port}:{CONFIG}",
                   "model_path": str(self.world.model), **(model or {})}  # fmt: skip
        accuracy = {"tasks": ["pick"], "include_path": str(self.tasks), **suite}
        accuracy = {key: value for key, value in accuracy.items() if value is not None}
        whole = {"model": section, "benchmarks": {"lm_eval": {"accuracy": accuracy}}, **(write or {})}
        file = self.world.root / "bench_config.yaml"
        file.write_text(yaml.safe_dump(whole))
        return file

    def flags(self, config: Path) -> list[str]:
        return ["--bench-config", str(config), "--output-dir", str(self.output)]

    def result(self) -> dict[str, Any]:
        return json.loads((self.output / "stage7.json").read_text())


def write_tokenizer(folder: Path, *, chat: bool = False) -> None:
    """Words by spaces, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{word: 3 + number for number, word in enumerate(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if chat:
        fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ ' w1 ' }}"
    fast.save_pretrained(folder)


def write_tasks(folder: Path, model: Path, items: int) -> None:
    """`pick`: one-word choices; `pairs`: two-word choices; `say`: two generated words; `guess`: answers at random."""
    folder.mkdir(exist_ok=True)
    generator = random.Random(7)
    reference = load_reference(model, torch.float32)
    pick, pairs, say, guess = [], [], [], []
    for _ in range(items):
        context, choices = generator.sample(WORDS, 3), generator.sample(WORDS, 3)
        doubled = [f"{word} {generator.choice(WORDS)}" for word in choices]
        pick.append(_item(context, choices, _best(reference, context, [[word] for word in choices])))
        pairs.append(_item(context, doubled, _best(reference, context, [text.split() for text in doubled])))
        guess.append(_item(context, choices, generator.randrange(3)))
        say.append({"context": " ".join(context), "answer": " ".join(_greedy(reference, context, 2))})
    for name, rows in {"pick": pick, "pairs": pairs, "guess": guess}.items():
        _write(folder, name, rows, {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
                                    "metric_list": [{"metric": "acc"}]})  # fmt: skip
    _write(folder, "say", say[:24], {
        "output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2},
        "metric_list": [{"metric": "exact_match"}],
    })  # fmt: skip
    _write(folder, "nothing", [], {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"})
    _write(folder, "rolling", say[:2], {"output_type": "loglikelihood_rolling", "doc_to_text": "",
                                        "doc_to_target": "{{context}}"})  # fmt: skip


def _write(folder: Path, name: str, rows: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
            "test_split": "test", "doc_to_text": "{{context}}", "doc_to_target": "answer", **fields}  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def _item(context: list[str], choices: list[str], answer: int) -> dict[str, Any]:
    return {"context": " ".join(context), "choices": choices, "answer": answer}


def _ids(words: list[str]) -> list[int]:
    return [3 + WORDS.index(word) for word in words]


def _best(model: Any, context: list[str], choices: list[list[str]]) -> int:
    scores = []
    for words in choices:
        tokens = _ids([*context, *words])
        with torch.no_grad():
            log = model(input_ids=torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
        first = len(context) - 1
        scores.append(sum(float(log[first + at, token]) for at, token in enumerate(tokens[len(context) :])))
    return scores.index(max(scores))


def _greedy(model: Any, context: list[str], count: int) -> list[str]:
    tokens = _ids(context)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    names = ["<unk>", "<s>", "</s>", *WORDS]
    return [names[token] for token in tokens[-count:]]
