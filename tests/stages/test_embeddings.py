"""Embedding targets made of real small classes: right ones pass, wrong ones fail with the right reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_world import Port, first, last, lean, mean, write_model, write_modules, write_prompts
from torch import Tensor

from equiport.compare.embedding_thresholds import EmbeddingThresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment.hashing import sha256
from equiport.reference.pooling import PoolingMode
from equiport.report.embeddings import write_embeddings_page
from equiport.stages.embedding_targets import CallableTarget, FileTarget, run_plan, save_vectors
from equiport.stages.embeddings import (
    EmbeddingOptions,
    EmbeddingResult,
    ask,
    load_embedding_result,
    run_embeddings,
)

MEAN_OF_BERT, LAST_OF_QWEN3 = ("bert", "mean_tokens"), ("qwen3", "lasttoken")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folders by class and pooling, made once."""
    root = tmp_path_factory.mktemp("embedders")
    write_prompts(root / "prompts.txt")

    def made(kind: str, mode: str) -> Path:
        folder = root / f"{kind}-{mode}"
        if not folder.exists():
            write_modules(write_model(folder, kind), mode, normalize=True)
        return folder

    return made


def judged(folder: Path, target: Any, **options: Any) -> EmbeddingResult:
    """The result of a callable on the short prompts."""
    given = EmbeddingOptions(folder, prompts=folder.parent / "prompts.txt", batch_size=4, **options)
    return run_embeddings(given, CallableTarget(target))


def codes(result: EmbeddingResult) -> set[str]:
    return {item.code for item in result.reasons}


RIGHT: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "mean of bert, sdpa": (MEAN_OF_BERT, {"rows": mean}),
    "mean of bert, padded on the left": (MEAN_OF_BERT, {"rows": mean, "side": "left"}),
    "cls of bert, eager": (("bert", "cls_token"), {"rows": first, "attention": "eager"}),
    "last of qwen3, sdpa": (LAST_OF_QWEN3, {"rows": last}),
    "last of qwen3, padded on the left": (LAST_OF_QWEN3, {"rows": last, "side": "left"}),
    "last of llama in fp32": (("llama", "lasttoken"), {"rows": last, "dtype": torch.float32}),
    "mean of bert in fp32": (MEAN_OF_BERT, {"rows": mean, "dtype": torch.float32}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_targets_pass(world: Callable[[str, str], Path], name: str) -> None:
    made, port = RIGHT[name]
    folder = world(*made)
    result = judged(folder, Port(folder, **port), precision="fp32" if "dtype" in port else "bf16")
    assert result.verdict is Verdict.PASS, result.reasons
    found = result.comparison
    assert len(found.prompts) == 12 and found.padded and found.batched
    assert all(row.batched is not None and row.swapped is not None for row in found.prompts)
    assert result.layouts == ["right", "left"]


def over_padding(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.mean(1)


def column(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden[:, -1]


def before_last(hidden: Tensor, mask: Tensor) -> Tensor:
    places = (mask.sum(1) - 2).clamp(min=0)
    return hidden[torch.arange(len(hidden)), places]


def next_row_leaks(found: Tensor) -> Tensor:
    return torch.nn.functional.normalize(found + 0.03 * found.roll(1, 0), dim=-1)


def one_nan(found: Tensor) -> Tensor:
    return found.index_fill(1, torch.tensor([3]), float("nan")) if len(found) > 1 else found


WRONG: dict[str, tuple[tuple[str, str], dict[str, Any], set[str], str]] = {
    "mean over padding": (MEAN_OF_BERT, {"rows": over_padding}, {"BATCH_DEPENDENT"}, ""),
    "last column, padded on the right": (LAST_OF_QWEN3, {"rows": column}, {"BATCH_DEPENDENT"}, ""),
    "the token before the last": (
        LAST_OF_QWEN3, {"rows": before_last}, {"EMBEDDING_COSINE"}, "the token before the last",
    ),
    "cls for mean": (MEAN_OF_BERT, {"rows": first}, {"EMBEDDING_COSINE"}, "cls pooling"),
    "causal for bidirectional": (MEAN_OF_BERT, {"rows": mean, "causal": True}, {"EMBEDDING_COSINE"}, "causal"),
    "bidirectional for causal": (
        LAST_OF_QWEN3, {"rows": last, "causal": False}, {"EMBEDDING_COSINE"}, "whole sequence",
    ),
    "padding is attended to": (MEAN_OF_BERT, {"rows": mean, "masked": False}, {"BATCH_DEPENDENT"}, ""),
    "a neighbour leaks": (
        MEAN_OF_BERT, {"rows": mean, "after": next_row_leaks}, {"BATCH_DEPENDENT", "NEIGHBOUR_LEAK"}, "",
    ),
    "not normalised": (MEAN_OF_BERT, {"rows": mean, "normalize": False}, {"EMBEDDING_NORM"}, ""),
    "NaN in batches": (MEAN_OF_BERT, {"rows": mean, "after": one_nan}, {"NON_FINITE_METRIC"}, ""),
    "zeros": (MEAN_OF_BERT, {"rows": mean, "after": torch.zeros_like}, {"DEGENERATE_TARGET"}, ""),
    "half the width": (MEAN_OF_BERT, {"rows": mean, "after": lambda found: found[:, :32]}, {"SHAPE_MISMATCH"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_targets_fail_with_the_right_reason(world: Callable[[str, str], Path], name: str) -> None:
    made, port, expected, hint = WRONG[name]
    folder = world(*made)
    result = judged(folder, Port(folder, **port))
    assert result.verdict is Verdict.FAIL
    alone_are_right = "EMBEDDING_COSINE" not in expected
    assert expected <= codes(result), result.reasons
    assert not alone_are_right or codes(result) == expected, result.reasons
    assert hint in " ".join(result.hints), result.hints


def test_small_leaks_in_fp32(world: Callable[[str, str], Path]) -> None:
    """1e-3 of a neighbour moves the cosine by 5e-7 only."""
    folder = world(*MEAN_OF_BERT)
    leak = Port(folder, mean, dtype=torch.float32, after=lambda found: found + 1e-3 * found.roll(1, 0))
    result = judged(folder, leak, precision="fp32")
    assert result.verdict is not Verdict.PASS and "BATCH_DEPENDENT" in codes(result)


def test_an_error_beyond_bf16_that_cosines_let_pass(world: Callable[[str, str], Path]) -> None:
    """Two percent of one direction: cosines above 0.999, ten times what rounding explains."""
    folder = world(*MEAN_OF_BERT)
    shift = 0.04 * torch.nn.functional.normalize(torch.linspace(-1, 1, 64), dim=0)
    port = Port(folder, mean, after=lambda found: torch.nn.functional.normalize(found + shift, dim=-1))
    result = judged(folder, port)
    assert min(row.cosine for row in result.comparison.prompts) > 0.999
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"EMBEDDING_NOISE"}


def test_what_bf16_hides_shows_in_fp32(world: Callable[[str, str], Path]) -> None:
    """GELU by tanh in place of erf."""
    folder = world(*MEAN_OF_BERT)
    port = Port(folder, mean, dtype=torch.float32)
    for layer in port.model.encoder.layer:
        layer.intermediate.intermediate_act_fn = torch.nn.GELU("tanh")
    result = judged(folder, port, precision="fp32")
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"EMBEDDING_NOISE"}


def constant(folder: Path) -> Callable[[Any], Tensor]:
    """One vector for every prompt: the mean of the right ones."""
    right = Port(folder, mean)
    plan = ask(EmbeddingOptions(folder, prompts=folder.parent / "prompts.txt")).plan
    one = torch.cat([right([list(item.ids)]) for item in plan.items]).mean(0, keepdim=True)
    return lambda batch: torch.nn.functional.normalize(one, dim=-1).repeat(len(batch), 1)


@pytest.fixture(scope="module")
def leaning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bert whose embeddings of unrelated prompts have cosines near 0.9986."""
    root = tmp_path_factory.mktemp("leaning")
    write_prompts(root / "prompts.txt")
    return lean(write_modules(write_model(root / "model", "bert"), "mean_tokens", normalize=True), 6.5)


def test_a_right_port_of_an_anisotropic_model_passes(leaning: Path) -> None:
    result = judged(leaning, Port(leaning, mean))
    assert result.comparison.cross is not None and result.comparison.cross.reference_mean > 0.99
    assert result.verdict is Verdict.PASS, result.reasons


def test_a_constant_that_has_the_right_cosines_is_collapsed(leaning: Path) -> None:
    result = judged(leaning, constant(leaning))
    cosines = sorted(row.cosine for row in result.comparison.prompts)
    assert cosines[len(cosines) // 2] > 0.999
    assert result.verdict is Verdict.FAIL and "COLLAPSED" in codes(result)


def test_prompts_shrunk_towards_their_mean_are_collapsed(leaning: Path) -> None:
    """Half the spread: every cosine passes, pairs are within 0.01 of the source's."""
    middle = constant(leaning)([0])
    port = Port(leaning, mean, after=lambda found: torch.nn.functional.normalize((found + middle) / 2, dim=-1))
    result = judged(leaning, port)
    assert min(row.cosine for row in result.comparison.prompts) > 0.999
    assert result.verdict is Verdict.FAIL and "COLLAPSED" in codes(result)


def test_a_collapsed_source_proves_nothing(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.txt")
    folder = lean(write_modules(write_model(tmp_path / "model", "bert"), "mean_tokens", normalize=True), 60.0)
    for target in (Port(folder, mean), constant(folder)):
        result = judged(folder, target)
        assert result.verdict is not Verdict.PASS and "REFERENCE_COLLAPSED" in codes(result)


def test_what_was_not_normalised_is_not_to_be(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.txt")
    folder = write_modules(write_model(tmp_path / "model", "bert"), "mean_tokens", normalize=False)
    assert judged(folder, Port(folder, mean, normalize=False)).verdict is Verdict.PASS
    result = judged(folder, Port(folder, mean))
    assert codes(result) == {"EMBEDDING_NORM"} and "it is normalised" in result.reasons[0].message


def test_result_page_and_hashes(world: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = world(*LAST_OF_QWEN3)
    result = judged(folder, Port(folder, last), out=tmp_path)
    stored = load_embedding_result(tmp_path / "embeddings.json")
    assert stored.verdict is result.verdict and stored.comparison == result.comparison
    assert stored.inputs[str((folder / "model.safetensors").resolve())] == sha256(folder / "model.safetensors")
    assert str((folder / "1_Pooling" / "config.json").resolve()) in stored.inputs
    assert stored.evidence == {"embeddings.safetensors": sha256(tmp_path / "embeddings.safetensors")}
    page = write_embeddings_page(tmp_path, stored).read_text()
    assert "**PASS: 12 prompts" in page and page.count("\n| 1") >= 2 and "## Not seen" in page


def test_a_file_of_vectors(world: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = world(*MEAN_OF_BERT)
    options = EmbeddingOptions(folder, prompts=folder.parent / "prompts.txt", batch_size=4)
    plan = ask(options).plan
    port = Port(folder, mean)
    vectors = run_plan(plan, lambda batch: port([item.ids for item in batch]))
    target = FileTarget(save_vectors(tmp_path / "all.safetensors", plan, vectors))
    assert run_embeddings(options, target).verdict is Verdict.PASS
    alone = type(vectors)(vectors.alone)
    result = run_embeddings(options, FileTarget(save_vectors(tmp_path / "alone.safetensors", plan, alone)))
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"NOT_BATCHED"}
    other_plan = ask(EmbeddingOptions(folder, prompts=folder.parent / "prompts.txt", batch_size=3)).plan
    with pytest.raises(EquiportError, match="other prompts, model or batches"):
        FileTarget(save_vectors(tmp_path / "other.safetensors", other_plan, vectors)).vectors(plan)
    short = type(vectors)(vectors.alone[:-1], vectors.batched, vectors.swapped)
    with pytest.raises(EquiportError, match="alone.*11, 64"):
        FileTarget(save_vectors(tmp_path / "short.safetensors", plan, short)).vectors(plan)


def test_missing_rows_are_a_clear_error(world: Callable[[str, str], Path]) -> None:
    folder = world(*MEAN_OF_BERT)
    port = Port(folder, mean)
    with pytest.raises(EquiportError, match=r"\[3, 64\] for 4 prompts"):
        judged(folder, lambda batch: port(batch)[: max(1, len(batch) - 1)])


def test_token_ids_and_one_length(world: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Prompts of ids need no tokenizer; without unequal lengths padding was not there, and nothing passes."""
    folder = world(*LAST_OF_QWEN3)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (5, 9, 14, 3, 11, 7, 16, 8)]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(ids))
    options = EmbeddingOptions(folder, prompts=file, batch_size=4)
    assert run_embeddings(options, CallableTarget(Port(folder, last))).verdict is Verdict.PASS
    file.write_text(json.dumps([row[:3] for row in ids]))
    result = run_embeddings(options, CallableTarget(Port(folder, last)))
    assert result.verdict is Verdict.INCONCLUSIVE and codes(result) == {"NOT_BATCHED"}


def test_thresholds_from_a_file(world: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = world(*LAST_OF_QWEN3)
    file = tmp_path / "limits.json"
    EmbeddingThresholds(cosine=0.9999999, noise_factor=0.1).save(file)
    result = judged(folder, Port(folder, last), thresholds=file)
    assert result.verdict is Verdict.FAIL and "EMBEDDING_COSINE" in codes(result)
    assert result.thresholds.cosine == 0.9999999
    file.write_text('{"cosinus": 1}')
    with pytest.raises(EquiportError, match="cosinus"):
        judged(folder, Port(folder, last), thresholds=file)


@pytest.mark.parametrize("flag", [PoolingMode.LAST, PoolingMode.CLS])
def test_a_flag_against_the_files(world: Callable[[str, str], Path], flag: PoolingMode) -> None:
    with pytest.raises(EquiportError, match="files say mean"):
        judged(world(*MEAN_OF_BERT), lambda batch: torch.zeros(1, 1), pooling=flag)
