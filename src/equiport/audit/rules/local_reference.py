"""A copy of the reference in the work folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Sample, Severity
from equiport.audit.paraphrase import closest_source, similarity_limit
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule

_NAMES = ("pytorch_block", "reference_block", "torch_block")
_COPY = '''
class {name}(nn.Module):
    """The feed-forward network."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.hidden = cfg.hidden_size
        self.inner = cfg.intermediate_size
        self.gate = nn.Linear(self.hidden, self.inner, bias=cfg.mlp_bias)
        self.up = nn.Linear(self.hidden, self.inner, bias=cfg.mlp_bias)
        self.down = nn.Linear(self.inner, self.hidden, bias=cfg.mlp_bias)
        self.act = ACT2FN[cfg.hidden_act]

    def forward(self, states):
        out = self.down(self.act(self.gate(states)) * self.up(states))
        return out
'''


def check(module: ParsedModule) -> Iterator[Hit]:
    """A file named like the copy, and classes outside the port that paraphrase a class of transformers."""
    if module.path.stem in _NAMES:
        yield Hit(1, f"{module.path.name} is where a rewritten reference is kept")
    if module.role in (Role.PORT, Role.PATCH):
        return
    for node in module.classes:
        if not any(isinstance(item, ast.FunctionDef) and item.name == "forward" for item in node.body):
            continue
        found = closest_source(module, node)
        if found is not None and found.score >= similarity_limit(node):
            yield Hit(
                node, f"{node.name} paraphrases {found.name} of {found.file} ({found.score:.0%} of its code alike)"
            )


RULE = Rule(
    id="local-reference",
    severity=Severity.ERROR,
    title="the reference is copied into the work folder",
    why="A reference that was written beside the port agrees with the port's mistakes.",
    remedy="Import the source class from its original file and delete the copy.",
    check=check,
    bad=(
        Sample("from torch import nn\n\nclass PyTorchBlock(nn.Module):\n    pass\n", "pytorch_block.py"),
        in_test(head="from torch import nn\nfrom transformers.activations import ACT2FN\n" + _COPY.format(name="Mlp")),
        Sample(
            "from torch import nn\nfrom transformers.activations import ACT2FN\n" + _COPY.format(name="LlamaMLP"),
            "reference_llama.py",
        ),
    ),
    good=(
        in_test(),
        Sample(
            "from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear\n"
            "from torch import nn\nfrom transformers.activations import ACT2FN\n" + _COPY.format(name="NeuronLlamaMLP"),
            "modeling_llama_nxdi.py",
        ),
        in_test(
            head="from torch import nn\n\n\nclass Wrapped(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.inner = LlamaMLP(CONFIG)\n\n    def forward(self, x):\n        return self.inner(x)\n"
        ),
    ),
)
