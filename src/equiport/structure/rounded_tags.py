"""Tags that outlive a cast to bf16: numbers in several passes, a small odd digit each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_BASE = 64
#: An odd number below 2 * 64, as all digits are; where it does not arrive as it was sent, the tensor was computed.
WITNESS = 93.0


def is_rounded(sent: Tensor) -> bool:
    """Whether every element is a bf16 number: tags of many digits hardly are unless they were cast."""
    return bool((sent.bfloat16().float() == sent).all())


def digits(largest: int) -> int:
    """How many passes numbers up to `largest` take."""
    count = 1
    while _BASE**count <= largest:
        count += 1
    return count


def digit(numbers: Tensor, place: int) -> Tensor:
    """The digit of whole numbers at a place, as it is sent: odd, 1..127, exact in bf16."""
    return (numbers.long() // _BASE**place % _BASE * 2 + 1).float()


def combined(
    send: Callable[[int], Mapping[str, Tensor]], count: int, names: list[str], witness: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Numbers put together of `count` passes, float64; -1 where a digit or the witness did not arrive whole."""
    found: dict[str, Tensor] = {}
    for place in range(count):
        arrived = send(place)
        for name in names:
            value = arrived[name].double()
            whole = (value % 2 == 1) & (value >= 1) & (value < 2 * _BASE) & (witness[name] == WITNESS)
            number = torch.where(whole, (value - 1) / 2 * _BASE**place, -torch.inf)
            found[name] = found.get(name, torch.zeros_like(number)) + number
    return {name: torch.where(value < 0, -1.0, value) for name, value in found.items()}
