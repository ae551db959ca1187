"""Projections: transposed, wrong rows or columns, another layer's weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case, observed, predicted
from equiport.localize.causes.scale import is_linear
from equiport.localize.drafts import Order, OwnWeights, ReorderWeight, TransposeWeight
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_SAME = 1e-4


class Transposed(Hypothesis):
    """A weight that went in untransposed, or was reshaped instead of transposed."""

    kind = "transpose"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One candidate a projection."""
        for path, module in case.sites(Part.LINEAR):
            assert isinstance(module, nn.Linear)

            def edit(at: Case, surgery: Surgery, path: str = path) -> None:
                linear = at.model.get_submodule(path)
                weight = linear.weight
                assert isinstance(weight, Tensor)
                square = weight.shape[0] == weight.shape[1]
                turned = weight.t() if square else weight.t().reshape(weight.shape)
                surgery.parameter(linear, "weight", turned.contiguous().clone())

            yield Candidate(
                f"{path}.weight is transposed",
                edit,
                "transpose it in the conversion",
                TransposeWeight(of=(path,)),
            )


class OutputOrder(Hypothesis):
    """The output's channels are the source's in another order: swapped halves, interleaved, heads moved."""

    kind = "fused layout or head order"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The permutation found by matching columns, if the columns match one to one."""
        theirs, ours = observed(case.observations), predicted(reference, case.observations)
        if not is_linear(case) or theirs.shape != ours.shape or ours.shape[1] < 2:
            return
        order = match_columns(theirs, ours)
        if order is None or order == list(range(len(order))):
            return

        def edit(at: Case, surgery: Surgery) -> None:
            if len(at.sources) == 1:
                surgery.output(at.modules[0], lambda _, out: out[..., order])
                return
            _permute_fused(at, surgery, order)

        yield Candidate(
            f"output channels stand in another order: {order_in_words(order, case)}",
            edit,
            "put the rows of the weight into the source's order in the conversion",
            _rows_draft(order, case),
        )


def _permute_fused(case: Case, surgery: Surgery, order: list[int]) -> None:
    """Permute the rows of several projections as if they were one."""
    linears = [module for module in case.modules if isinstance(module, nn.Linear)]
    sizes = [linear.out_features for linear in linears]
    stacked = torch.cat([linear.weight for linear in linears])[order]
    for linear, weight in zip(linears, stacked.split(sizes), strict=True):
        surgery.parameter(linear, "weight", weight.clone())
    if all(linear.bias is not None for linear in linears):
        biases = torch.cat([linear.bias for linear in linears])[order]
        for linear, bias in zip(linears, biases.split(sizes), strict=True):
            surgery.parameter(linear, "bias", bias.clone())


def match_columns(theirs: Tensor, ours: Tensor) -> list[int] | None:
    """For each column of `theirs` the column of `ours` that equals it; None when some have none."""
    left = theirs / theirs.norm(dim=0).clamp_min(1e-30)
    right = ours / ours.norm(dim=0).clamp_min(1e-30)
    best, index = (left.t() @ right).max(dim=1)
    picked = ours[:, index]
    if float((theirs - picked).norm()) > _SAME * float(theirs.norm()) or float(best.min()) < 0.99:
        return None
    return [int(column) for column in index]


def order_in_words(order: list[int], case: Case) -> str:
    """What the permutation does, if it is one of the usual ones."""
    size = len(order)
    half = size // 2
    plain = list(range(size))
    head = int(
        case.number("head_dim") or (case.number("hidden_size") or 0) // (case.number("num_attention_heads") or 1)
    )
    usual = {
        "halves swapped (gate and up)": plain[half:] + plain[:half],
        "interleaved, where the source has halves": [i // 2 + (i % 2) * half for i in plain] if size % 2 == 0 else [],
        "halves, where the source interleaves": plain[0::2] + plain[1::2],
        "reversed": plain[::-1],
    }
    if head and size % head == 0:
        usual["heads and channels transposed"] = torch.arange(size).view(-1, head).t().reshape(-1).tolist()
        blocks = [order[start : start + head] for start in range(0, size, head)]
        if all(block == list(range(block[0], block[0] + head)) and block[0] % head == 0 for block in blocks):
            usual[f"heads in the order {[block[0] // head for block in blocks]}"] = order
    return next((words for words, value in usual.items() if value == order), f"starts {order[:8]}")


_INVERSES: dict[str, Order] = {
    "halves swapped": "halves swapped",
    "interleaved": "part the interleaved",
    "halves, where": "interleave halves",
    "reversed": "reversed",
    "heads and channels transposed": "channels and heads transposed",
}


def _rows_draft(order: list[int], case: Case) -> ReorderWeight | None:
    """The inverse of an order that has a name; other orders hold for one size alone."""
    words = order_in_words(order, case)
    name = next((name for start, name in _INVERSES.items() if words.startswith(start)), None)
    single = len(case.sources) == 1 and not case.entry.align
    return ReorderWeight(of=case.sources, axis=0, order=name) if name and single else None


class InputOrder(Hypothesis):
    """A projection reads its input's channels in another order (heads and channels transposed, halves swapped)."""

    kind = "fused layout or head order"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """The usual permutations of the input."""
        for path, module in case.sites(Part.LINEAR):
            assert isinstance(module, nn.Linear)
            for words, order, inverse in _usual_inputs(module.in_features, case):

                def edit(at: Case, surgery: Surgery, path: str = path, order: list[int] = order) -> None:
                    linear = at.model.get_submodule(path)
                    weight = linear.weight
                    assert isinstance(weight, Tensor)
                    surgery.parameter(linear, "weight", weight[:, order].clone())

                yield Candidate(
                    f"{path} reads its input with {words}", edit, "order the weight's columns as the source does",
                    ReorderWeight(of=(path,), axis=1, order=inverse),
                )  # fmt: skip


def _usual_inputs(size: int, case: Case) -> Iterable[tuple[str, list[int], Order]]:
    """Words, the columns' order, and the order that undoes it."""
    plain, half = list(range(size)), size // 2
    if size % 2 == 0:
        yield "halves swapped", plain[half:] + plain[:half], "halves swapped"
    heads = int(case.number("num_attention_heads") or 0)
    groups = int(case.number("num_key_value_heads") or heads)
    if heads and size % heads == 0:
        grid = torch.arange(size).view(heads, -1)
        transposed = grid.t().reshape(-1).tolist()
        yield "heads and channels transposed", transposed, "channels and heads transposed"
        yield (
            "channels and heads transposed",
            torch.arange(size).view(-1, heads).t().reshape(-1).tolist(),
            ("heads and channels transposed"),
        )
        yield "heads reversed", grid.flip(0).reshape(-1).tolist(), "heads reversed"
        if groups and heads % groups == 0 and 1 < groups < heads:
            grouped = grid.view(groups, heads // groups, -1)
            yield "heads of a group spread", grouped.transpose(0, 1).reshape(-1).tolist(), "groups gathered"


class OtherLayer(Hypothesis):
    """The weights of another layer stand in this one."""

    kind = "wrong layer's weights"
    cost = 2

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Every other layer's module of the same path, for the suspect and for the weighted parts inside it."""
        for source in case.sources:
            found = re.search(r"\.(\d+)(\.|$)", source)
            if found is None:
                continue
            own = int(found.group(1))
            for other in range(int(case.number("num_hidden_layers") or 0)):
                if other == own:
                    continue
                for path in _weighted(case, source):
                    there = path[: found.start()] + f".{other}" + path[found.start(1) + len(found.group(1)) :]
                    if there in dict(case.model.named_modules()):
                        yield _from(path, there)


def _weighted(case: Case, source: str) -> list[str]:
    root = case.model.get_submodule(source)
    inner = [f"{source}.{path}".strip(".") for path, module in root.named_modules() if module._parameters]
    return list(dict.fromkeys([source, *inner]))


def _from(path: str, there: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        try:
            module, other = at.model.get_submodule(path), at.model.get_submodule(there)
        except AttributeError:
            return
        theirs = dict(other.named_parameters())
        for name, own in module.named_parameters():
            if name in theirs and theirs[name].shape == own.shape:
                holder, leaf = name.rpartition(".")[::2]
                surgery.parameter(module.get_submodule(holder), leaf, theirs[name].detach().clone())

    draft = OwnWeights(of=(path,), other=there)
    return Candidate(f"{path} holds the weights of {there}", edit, "load each layer's own weights", draft)
