"""Inputs too short to reach what they are to test."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT
from equiport.audit.identity import number_of
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.names import BLOCK_TESTS
from equiport.audit.queries import comparisons
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, keywords

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "sliding_window_size")
_DRAWING = frozenset({"torch.randn", "torch.rand", "torch.randint", "torch.empty"})
_LENGTHS = ("seq_len", "SEQ_LEN", "seq_length", "prompt_len", "SEQUENCE_LENGTH", "sequence_length")
#: Sequences on which attention has next to nothing to choose from.
_FEW = 4


def check(module: ParsedModule) -> Iterator[Hit]:
    """Windows that no drawn sequence leaves; attention compared on so few tokens that masks and positions are idle."""
    if module.role is not Role.TEST or not _compares_port(module):
        return
    lengths = [(node, length) for node, length in _drawn(module) if length > 0]
    if not lengths:
        return
    at, longest = max(lengths, key=lambda item: item[1])
    for node, window in _windows(module):
        if window > 1 and longest <= window:
            yield Hit(node, f"the longest sequence has {longest:g} tokens: the window of {window:g} is never left")
    if longest < _FEW and _attends(module):
        yield Hit(at, f"attention on {longest:g} tokens: masks and positions have nothing to do")


def _drawn(module: ParsedModule) -> Iterator[tuple[ast.AST, float]]:
    """Lengths of drawn inputs: the dimension before the last of three, the last of token ids, and `seq_len=`."""
    for call in module.calls:
        name = module.is_any(call.func, _DRAWING)
        if name:
            sizes = _sizes(module, call, name)
            place = -1 if name.endswith("randint") else -2
            if len(sizes) >= (2 if name.endswith("randint") else 3):
                length = number_of(module.flow, sizes[place])
                if length is not None:
                    yield call, length
        given = keywords(module, call).get("seq_len")
        length = number_of(module.flow, given) if given is not None else None
        if length is not None and module.is_any(call.func, BLOCK_TESTS):
            yield call, length
    for node in module.nodes:
        if isinstance(node, ast.Assign) and any(getattr(item, "id", "") in _LENGTHS for item in node.targets):
            length = number_of(module.flow, node.value)
            if length is not None:
                yield node, length


def _sizes(module: ParsedModule, call: ast.Call, name: str) -> list[ast.expr]:
    given = keywords(module, call).get("size")
    if isinstance(given, (ast.Tuple, ast.List)):
        return given.elts
    spread = [item for item in call.args if isinstance(item, (ast.Tuple, ast.List))]
    if spread:
        return spread[-1].elts
    return [] if name.endswith("randint") else list(call.args)


def _windows(module: ParsedModule) -> Iterator[tuple[ast.AST, float]]:
    for call in module.calls:
        for name, value in keywords(module, call).items():
            window = number_of(module.flow, value) if name in _WINDOWS else None
            if window is not None:
                yield call, window
    for node in module.nodes:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                window = number_of(module.flow, value) if getattr(key, "value", "") in _WINDOWS else None
                if window is not None:
                    yield node, window


def _compares_port(module: ParsedModule) -> bool:
    """Whether both a source and a port are compared here."""
    sides = [side for item in comparisons(module) if item.kind in ("tensors", "block") for side in item.sides]
    return any(PORT in module.flow.origins(side) for side in sides)


def _attends(module: ParsedModule) -> bool:
    """Whether what is compared comes from an attention or a layer of the port."""
    named = [
        dotted for names in module.imports.values() for dotted in names
        if dotted.rpartition(".")[2].endswith(("Attention", "DecoderLayer", "Block"))
    ]  # fmt: skip
    return bool(named)


_CONFIG = "from transformers import MistralConfig\n\nCONFIG = MistralConfig(hidden_size=64, sliding_window={window})\n"
_DRAW = "    x = torch.randn(2, {length}, 64)\n    out1, out2, out3 = ref_fp32(x), ref_bf16(x), target(x)\n"
_ATTENTION = "from transformers.models.llama.modeling_llama import LlamaAttention\n"


def _short(length: int, window: int) -> str:
    return f"    CONFIG_W = dict(sliding_window={window})\n" + _run(length)


def _run(length: int) -> str:
    return (
        "    ref_fp32, ref_bf16, target = LlamaMLP(CONFIG), LlamaMLP(CONFIG).bfloat16(), NeuronMLP(CONFIG)\n"
        + _DRAW.format(length=length)
    )


RULE = Rule(
    id="short-sequences",
    severity=Severity.ERROR,
    title="sequences too short to reach what they test",
    why="A window that is never left, or a mask of two tokens, is right in every port.",
    remedy="Draw sequences longer than the window, of 16 tokens and more.",
    check=check,
    bad=(
        in_test(run=_run(24), head=_CONFIG.format(window=4096)),
        in_test(run=_short(16, 16)),
        in_test(run=_run(2), head=_ATTENTION),
        in_test(
            run="", head="SEQ_LEN = 12\n" + _CONFIG.format(window=32),
            judge="    test_block_correctness(NeuronMLP, LlamaMLP, {}, config=CONFIG, seq_len=SEQ_LEN)\n",
        ),
    ),
    good=(
        in_test(run=_run(24), head=_CONFIG.format(window=8)),
        in_test(run=_run(3)),
        in_test(run=_run(24), head=_ATTENTION),
        in_test(head="from transformers import MistralConfig\n\nCONFIG = MistralConfig(sliding_window=None)\n"),
    ),
)  # fmt: skip
