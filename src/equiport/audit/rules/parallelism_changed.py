"""vLLM-Neuron ports: what belongs to parallelism departs from its canonical form."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.source import FunctionNode, ParsedModule, keywords, literal

_COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
_GLOBAL_RANK = frozenset({"torch.distributed.get_rank", "torch.distributed.get_world_size"})
_WHOLE = {"torch.nn.Embedding": "VocabDimShardedEmbedding", "torch.nn.Linear": "ColumnParallelLinear"}


def check(module: ParsedModule) -> Iterator[Hit]:
    """Markers, collectives by phase, ranks, expert parallelism, and what must stay sharded.

    Canonical form: the Canonical Model porting guide.
    """
    roots = {dotted.partition(".")[0] for names in module.imports.values() for dotted in names}
    if module.role is not Role.PORT or "vllm_neuron" not in roots:
        return
    yield from _markers(module)
    for owner in module.classes:
        own = {item.name: item for item in owner.body if isinstance(item, ast.FunctionDef)}
        prefill, decode = own.get("forward_prefill"), own.get("forward_decode")
        before = _collectives(prefill) if prefill else {}
        after = _collectives(decode) if decode else {}
        if prefill is not None:
            yield from _prefill(prefill, before)
        if decode is not None:
            yield from _decode(decode, before, after)
    for node in module.nodes:
        if isinstance(node, ast.Call):
            yield from _call(module, node)
        elif isinstance(node, ast.Compare) and _asks_group(node):
            yield Hit(node, "asks the size of the expert group: enable_expert_parallel of the config says it")
    yield from _loading(module)


def _asks_group(node: ast.Compare) -> bool:
    return any(
        isinstance(item, ast.Attribute) and item.attr == "world_size" and "ep_group" in ast.unparse(item.value)
        for item in ast.walk(node)
    )


def _markers(module: ParsedModule) -> Iterator[Hit]:
    """`# >>> PARALLELISM: ... <<<` and `# <-- MODEL-SPECIFIC: ...`."""
    try:
        comments = [item for item in tokenize.generate_tokens(io.StringIO(module.text).readline)
                    if item.type == tokenize.COMMENT]  # fmt: skip
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return
    for item in comments:
        text = item.string.lstrip("# ").strip()
        if "PARALLELISM" in text and not (text.startswith(">>> PARALLELISM:") and text.endswith("<<<")):
            yield Hit(item.start[0], "a PARALLELISM marker in another form: # >>> PARALLELISM: ... <<<")
        elif text.startswith("MODEL-SPECIFIC"):
            yield Hit(item.start[0], "a MODEL-SPECIFIC marker in another form: # <-- MODEL-SPECIFIC: ...")


def _collectives(function: FunctionNode) -> dict[str, ast.Call]:
    return {
        node.func.attr: node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _COLLECTIVES
    }


def _prefill(function: FunctionNode, found: dict[str, ast.Call]) -> Iterator[Hit]:
    if "all_gather" in found and "reduce_scatter" not in found:
        yield Hit(found["all_gather"], "prefill gathers the sequence and never scatters it: reduce_scatter is gone")
    elif "reduce_scatter" in found and "all_gather" not in found:
        yield Hit(found["reduce_scatter"], "prefill scatters a sequence that was not gathered: all_gather is gone")
    elif "all_reduce" in found and not {"all_gather", "reduce_scatter"} & set(found):
        yield Hit(found["all_reduce"], "prefill sums over ranks where sequence parallelism gathers and scatters")
    for name in ("all_gather", "reduce_scatter"):
        call = found.get(name)
        if call is None:
            continue
        dim = {item.arg: item.value for item in call.keywords}.get("dim", call.args[1] if len(call.args) > 1 else None)
        if dim is not None and literal(dim) not in (0, None):
            yield Hit(call, f"{name} along dim {literal(dim)}: the sequence is dim 0")


def _decode(function: FunctionNode, before: dict[str, ast.Call], after: dict[str, ast.Call]) -> Iterator[Hit]:
    for name in ("all_gather", "reduce_scatter"):
        if name in after:
            yield Hit(after[name], f"decode calls {name}: there is no sequence parallelism in decode")
    if "reduce_scatter" in before and "all_reduce" not in after:
        yield Hit(function, "decode never sums over ranks: all_reduce is gone")


def _call(module: ParsedModule, call: ast.Call) -> Iterator[Hit]:
    name = module.is_any(call.func, _GLOBAL_RANK)
    if name:
        yield Hit(call, f"{name.rpartition('.')[2]} of the whole world: ranks are those of the TP group")
    whole = module.is_any(call.func, frozenset(_WHOLE))
    parent = module.parents.get(call)
    if whole and isinstance(parent, ast.Assign):
        target = ast.unparse(parent.targets[0])
        wanted = _WHOLE[whole]
        if target.endswith(("embed_tokens", "embedding")) if "Embedding" in whole else target.endswith("lm_head"):
            yield Hit(call, f"{target} is not sharded: {wanted} is")


def _loading(module: ParsedModule) -> Iterator[Hit]:
    loads = [item for item in module.functions if item.name == "load_weights" and module.class_of(item)]
    pipelined = any(getattr(call.func, "attr", "") == "load_sharded_pipelined" for call in module.calls)
    for function in loads:
        passes = any(
            isinstance(item, ast.Call) and getattr(item.func, "attr", "") in ("load_weights", "load_sharded_pipelined")
            for item in ast.walk(function)
        )
        if not pipelined and not passes:
            yield Hit(function, "load_weights goes its own way: load_sharded_pipelined is gone")
    for call in module.calls:
        strict = keywords(module, call).get("strict")
        if getattr(call.func, "attr", "") == "load_sharded_pipelined" and literal(strict) is False:
            yield Hit(call, "loads shards with strict off")


_HEAD = "import torch\nfrom torch import nn\nfrom vllm_neuron.distributed import get_tp_group\n\n\n"
_MLP = """class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        # >>> PARALLELISM: TP group <<<
        self.tp_group = get_tp_group()

    def forward_prefill(self, x):
        {gather}out = self.down(x)  # <-- MODEL-SPECIFIC: no gate
        return {prefill}

    def forward_decode(self, x):
        return {decode}
"""


def _mlp(
    gather: str = "x = self.tp_group.all_gather(x, dim=0)\n        ",
    prefill: str = "self.tp_group.reduce_scatter(out, dim=0)",
    decode: str = "self.tp_group.all_reduce(self.down(x))",
    rest: str = "",
) -> Sample:
    text = _MLP.replace("{gather}", gather).replace("{prefill}", prefill).replace("{decode}", decode)
    return Sample(_HEAD + text + rest, "modeling_x.py")


RULE = Rule(
    id="parallelism-changed",
    severity=Severity.ERROR,
    title="a PARALLELISM section is not in its canonical form",
    why="A collective that is missing or along another dimension changes nothing on one rank and everything on two.",
    remedy="Keep what is marked PARALLELISM as the canonical model has it; change what is marked MODEL-SPECIFIC.",
    check=check,
    bad=(
        _mlp(gather=""),
        _mlp(prefill="out"),
        _mlp(prefill="self.tp_group.reduce_scatter(out, dim=1)"),
        _mlp(decode="self.down(x)"),
        _mlp(decode="self.tp_group.reduce_scatter(self.down(x), dim=0)"),
        _mlp(rest="\n\ndef shard():\n    return torch.distributed.get_rank()\n"),
        _mlp(rest="\n\n# PARALLELISM (changed)\nEP = 1\n"),
        _mlp(rest="\n\ndef experts(ep_group):\n    return ep_group.world_size > 1\n"),
        _mlp(
            rest="\n\nclass Top(nn.Module):\n    def __init__(self, c):\n        self.lm_head = nn.Linear(c.h, c.v)\n"
            "\n    def load_weights(self, path):\n        self.load_state_dict(torch.load(path))\n"
        ),
    ),
    good=(
        _mlp(),
        _mlp(
            rest="\n\nclass Top(nn.Module):\n    def load_weights(self, checkpoint):\n"
            "        # >>> PARALLELISM: weights are sharded as they are read <<<\n"
            "        checkpoint.load_sharded_pipelined(self, {})\n"
        ),
        Sample(_MLP.format(gather="", prefill="x", decode="x").replace("get_tp_group()", "None"), "modeling_y.py"),
    ),
)
