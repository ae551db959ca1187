"""A projection gives every row of a batch what it gives the first: its output was indexed as if it were a tuple."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery
from equiport.trace.reference import capture_reference


class FirstRowsOutput(Hypothesis):
    """`linear(x)[0]` of a linear that returns a tensor is its first row, and is broadcast to the others."""

    kind = "batch row mixed up"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One a projection inside the suspect; of two whose defects are the same function the later comes first."""
        if case.batch.batch_size < 2 or case.is_entry or case.observations[0].places is None:
            return
        for path, _ in reversed(list(case.sites(Part.LINEAR))):
            if path in case.sources:
                continue

            def edit(at: Case, surgery: Surgery, path: str = path) -> None:
                steps, first = _steps(at, case), _first_row(at, case, path)

                def form(_: Tensor, out: Tensor) -> Tensor:
                    rows = at.batch.batch_size
                    own = out.reshape(rows, -1, out.shape[-1])  # some sources put the tokens of all rows together
                    if own.shape[:2] != steps.shape:
                        raise ValueError("gives no tensor [B, T, features]")
                    chosen = own[0] if first is None else first
                    return chosen[steps.clamp_max(len(chosen) - 1)].reshape(out.shape)

                surgery.output(at.model.get_submodule(path), form)

            yield Candidate(
                f"all rows of the batch are given the first row's output of {path}", edit,
                "take the whole output: [0] of a tensor is its first row",
            )  # fmt: skip


def _shares_a_run(at: Case, known: Case) -> bool:
    """Whether `known` holds the first row of the run that `at` is a part of: one model under several seeds."""
    return at is not known and at.model is known.model and at.first_length == known.batch.prompt_lengths[0]


def _steps(at: Case, known: Case) -> Tensor:
    """[B, T] places in the first row's tokens: the same in prefill, in decode those of the same step."""
    lengths = torch.tensor(at.batch.prompt_lengths)[:, None]
    start = (known if _shares_a_run(at, known) else at).batch.prompt_lengths[0]
    tokens = torch.arange(at.batch.max_length)[None].expand(at.batch.batch_size, -1)
    return torch.where(tokens < lengths, tokens, tokens - lengths + start)


def _first_row(at: Case, known: Case, path: str) -> Tensor | None:
    """[T, features] of `path` on the first row of the run, where that is not a row of `at`; else None."""
    if not _shares_a_run(at, known):
        return None
    out = capture_reference(at.model, known.batch, (path,)).outputs[path]
    return out.reshape(known.batch.batch_size, -1, out.shape[-1])[0]
