"""A fused projection to queries, keys and values is split otherwise than the source splits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import Surgery

_NAMES = ("query_key_value", "qkv_proj", "c_attn", "wqkv", "qkv", "in_proj")


class FusedSplit(Hypothesis):
    """Blocks of heads read as thirds, thirds as blocks, or the parts in another order."""

    kind = "fused layout or head order"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """On the fused projection of an attention under suspicion."""
        heads = int(case.number("num_attention_heads") or 0)
        groups = int(case.number("num_key_value_heads") or heads)
        for path, module in case.sites(Part.LINEAR):
            if path.rpartition(".")[2].lower() not in _NAMES or not isinstance(module, nn.Linear) or not heads:
                continue
            width = module.out_features // (heads + 2 * groups)
            if width * (heads + 2 * groups) != module.out_features:
                continue
            for words, form in _forms(heads, groups, width).items():

                def edit(at: Case, surgery: Surgery, path: str = path, form: Callable[[Tensor], Tensor] = form) -> None:
                    surgery.output(at.model.get_submodule(path), lambda _, out: form(out))

                yield Candidate(f"{path} is split {words}", edit, "split it as the source does")


def _forms(heads: int, groups: int, width: int) -> dict[str, Callable[[Tensor], Tensor]]:
    sizes = [heads * width, groups * width, groups * width]

    def ordered(*order: int) -> Callable[[Tensor], Tensor]:
        return lambda out: torch.cat([out.split(sizes, dim=-1)[part] for part in order], dim=-1)

    found = {"as queries, values, keys": ordered(0, 2, 1)}
    if heads == groups:
        found |= {
            "as keys, queries, values": ordered(1, 0, 2),
            "as values, keys, queries": ordered(2, 1, 0),
            "as thirds, where it holds blocks of heads": lambda out: (
                out.unflatten(-1, (3, heads, width)).transpose(-3, -2).flatten(-3)
            ),
            "as blocks of heads, where it holds thirds": lambda out: (
                out.unflatten(-1, (heads, 3, width)).transpose(-3, -2).flatten(-3)
            ),
        }
    return found
