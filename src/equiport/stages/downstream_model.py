"""The port and the source model as lm_eval sees them. Importing this module imports lm_eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM

from equiport.errors import EquiportError
from equiport.reference.model import quiet_transformers
from equiport.stages.downstream_engines import Engine, Row, Tokens

_Scored = tuple[Any, list[int], list[int]]
_DEFAULT_NEW_TOKENS = 256


class EngineLM(TemplateLM):
    """An lm_eval model over an `Engine`: log-likelihoods and greedy generation.

    `raised` is the error that the engine raised, if one did; `not_finite` counts answers with NaN or infinite logits.
    """

    def __init__(self, engine: Engine, folder: Path, longest: int | None) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(folder)
        self.raised: Exception | None = None
        self.not_finite = 0
        self._engine, self._folder, self._longest = engine, folder, longest

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        token = self.tokenizer.eos_token_id
        if token is None:
            raise EquiportError("the tokenizer has no eos_token", where=self._folder, remedy="Complete its config.")
        return int(token)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's own records."""
        return str(self._folder)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with the tokenizer's own special tokens unless told otherwise."""
        wanted = True if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=wanted)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The history as the model's own template writes it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See lm_eval; without a progress bar."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[_Scored], disable_tqdm: bool = True, **_: Any
    ) -> list[tuple[float, bool]]:
        """Choices of one token that share a context share its forward."""
        rows: dict[Row, int] = {}
        places: list[int] = []
        for _key, context, continuation in requests:
            if not continuation:
                raise EquiportError("an empty answer cannot be scored", field="doc_to_choice", remedy="Mend the task.")
            text: Tokens = (*context, *continuation[:-1])
            self._fits(len(text))
            places.append(rows.setdefault(Row(text, len(continuation)), len(rows)))
        wanted: dict[int, list[int]] = {}
        for number, place in enumerate(places):
            wanted.setdefault(place, []).append(number)
        out: list[tuple[float, bool]] = [(float("nan"), False)] * len(requests)
        for numbers, logits in self._guarded(self._engine.score(list(rows))):
            for at, place in enumerate(numbers):
                for number in wanted[place]:
                    out[number] = self._judged(logits[at], requests[number][2])
        return out

    def _judged(self, logits: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
        chosen = torch.tensor(list(continuation))
        log_probabilities = logits.double().log_softmax(-1).gather(-1, chosen[:, None])
        if not bool(torch.isfinite(log_probabilities).all()) or bool(torch.isnan(logits).any()):
            self.not_finite += 1
        return float(log_probabilities.sum()), bool((logits.argmax(-1) == chosen).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused.

        Raises:
            EquiportError: always.
        """
        raise EquiportError(
            "perplexity tasks (loglikelihood_rolling) are not offered: they give no score per item that can be paired",
            field="tasks",
            remedy="Choose multiple-choice or generation tasks.",
        )

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy generation up to the stop strings or `max_gen_toks` (default 256).

        Raises:
            EquiportError: a task that samples.
        """
        groups: dict[int, list[int]] = {}
        prompts: list[Tokens] = []
        stops: list[list[str]] = []
        for number, request in enumerate(requests):
            context, given = request.args
            if given.get("do_sample") and given.get("temperature", 1.0) != 0:
                raise EquiportError("the task samples; generation here is greedy", field="generation_kwargs.do_sample")
            most = int(given.get("max_gen_toks") or given.get("max_new_tokens") or _DEFAULT_NEW_TOKENS)
            until = given.get("until") or []
            stops.append([text for text in ([until] if isinstance(until, str) else until) if text])
            # a chat template has written the special tokens already
            chat = isinstance(context, str) and context.startswith(str(self.tokenizer.bos_token or "\0"))
            prompts.append(tuple(self.tok_encode(context, add_special_tokens=not chat)))
            self._fits(len(prompts[-1]) + most)
            groups.setdefault(most, []).append(number)
        out = [""] * len(requests)
        for most, numbers in groups.items():

            def ended(row: int, tokens: list[int], numbers: list[int] = numbers) -> bool:
                if tokens[-1] == self.eot_token_id:
                    return True
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                return any(stop in text for stop in stops[numbers[row]])

            try:
                made = self._engine.generate([prompts[number] for number in numbers], most, ended)
            except Exception as error:
                self.raised = error
                raise
            for number, tokens in zip(numbers, made, strict=True):
                text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                ends = [text.index(stop) for stop in stops[number] if stop in text]
                out[number] = text[: min(ends)] if ends else text
        return out

    def _fits(self, length: int) -> None:
        if self._longest is not None and length > self._longest:
            raise EquiportError(
                f"an item needs {length} positions, the model has {self._longest}",
                where=self._folder,
                remedy="Lower num_fewshot, or choose a task of shorter items.",
            )

    def _guarded(self, batches: Any) -> Any:
        try:
            yield from batches
        except Exception as error:
            self.raised = error
            raise


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.

    Raises:
        EquiportError: it has none, or it does not load.
    """
    from transformers import AutoTokenizer

    from equiport.stages.bench_config import has_tokenizer

    if not has_tokenizer(folder):
        raise EquiportError("holds no tokenizer", where=folder, remedy="Add tokenizer.json; stage 7 reads texts.")
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(str(folder))
    except (ValueError, OSError, KeyError, TypeError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise EquiportError(
            f"the tokenizer does not load: {said}", where=folder, remedy="Restore its files."
        ) from error
