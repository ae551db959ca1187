"""What a port keeps between calls: on a CPU, as a compiled graph keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT
from torch import Tensor

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter

HEAD = "class NeuronLlamaMLP(nn.Module):"
KEPT = "hidden_states = hidden_states + self.kept"
LOST = {
    "an attribute": ("self.kept = None", f"if self.kept is not None:\n            {KEPT}",
                     "self.kept = hidden_states[:, -1:].clone()"),
    "a buffer": ('self.register_buffer("kept", torch.zeros(1), persistent=False)', KEPT, "self.kept += 1"),
    "a parameter": ("self.kept = nn.Parameter(torch.zeros(1), requires_grad=False)", KEPT, "self.kept.data += 1"),
    "a parameter's data": ("self.kept = nn.Parameter(torch.zeros(1), requires_grad=False)", KEPT,
                           "self.kept.data = hidden_states.max().reshape(1)"),
    "a list": ("self.kept = []", "hidden_states = hidden_states + len(self.kept)", "self.kept.append(1)"),
    "a dict": ("self.kept = {}", "hidden_states = hidden_states + len(self.kept)", "self.kept[len(self.kept)] = 1"),
}  # fmt: skip
OWN_INSTANCE = """
class Instance:
    def __init__(self): self.module = None
    def get(self, bucket_rank, **kwargs):
        first = 1 + len(self.module.kv_mgr.past_key_values)
        return self.module, {self.module.steps: first + EXTRA}


class Wrapper(ModelWrapper):
    def get_model_instance(self): return Instance()


class NeuronLlamaModel(NeuronBaseModel):"""


def port(folder: Path, *pairs: tuple[str, str]) -> Path:
    text = PORT.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / "modeling_keeping.py"
    path.write_text(text)
    return path


def mlp_that(made: str, used: str, written: str, folder: Path) -> Path:
    """A port whose MLP makes something, uses it and writes to it."""
    before, _, mlp = PORT.read_text().partition(HEAD)
    for line, more in (("super().__init__()", made), ("def forward", f"{used}\n        {written}")):
        whole = next(each for each in mlp.splitlines() if line in each)
        mlp = mlp.replace(whole, f"{whole}\n        {more}", 1)
    path = folder / "modeling_keeping.py"
    path.write_text(before + HEAD + mlp)
    return path


def steps(adapter: StackAdapter, file: Path, folder: Path, times: int = 2) -> tuple[list[Tensor], tuple[str, ...]]:
    """Logits of a prefill of two ragged rows and three decode steps, `times` times, and what the run has shown."""
    model = adapter.create_model(file, CAUSAL, CONFIG, folder, dtype=torch.float32, batch_size=2, seq_len=16)
    adapter.load_weights(model, folder, torch.float32)
    ids = torch.arange(3, 17).reshape(2, 7)
    found = []
    for _ in range(times):
        lengths = torch.tensor([7, 4])
        found.append(adapter.forward(model, ids, lengths=lengths))
        for offset in range(3):
            found.append(adapter.forward(model, ids[:, offset : offset + 1], positions=lengths + offset))
    return found, adapter.run_notes(model)


@pytest.mark.parametrize("kind", list(LOST))
def test_what_no_alias_carries_is_dropped_and_told(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path, kind: str
) -> None:
    plain, notes = steps(adapter, PORT, plain_folder)
    assert notes == ()
    kept, notes = steps(adapter, mlp_that(*LOST[kind], tmp_path), plain_folder)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    assert len(notes) == 1 and "mlp.kept" in notes[0] and "drops" in notes[0]


def counting(folder: Path, extra: int = 0) -> Path:
    """Its own model instance aliases a count of calls, which the logits are multiplied with."""
    return port(
        folder,
        ("\n\nclass NeuronLlamaModel(NeuronBaseModel):", OWN_INSTANCE.replace("EXTRA", str(extra))),
        (
            "    def init_model(self, config",
            "    def forward(self, *args, **kwargs):\n        logits, *caches = super().forward(*args, **kwargs)\n"
            "        return [logits * (1 + self.steps), *caches, self.steps + 1]\n\n    def init_model(self, config",
        ),
        (
            "        self.embed_tokens = ",
            "        self.steps = nn.Parameter(torch.zeros(1), requires_grad=False)\n        self.embed_tokens = ",
        ),
        (
            "    _model_cls = NeuronLlamaModel",
            "    _model_cls = NeuronLlamaModel\n\n    def get_model_wrapper_cls(self):\n        return Wrapper\n",
        ),
        (
            "\n\nclass NeuronLlamaMLP(nn.Module):",
            "\nfrom neuronx_distributed_inference.models.model_wrapper import ModelWrapper\n\n\n" + HEAD,
        ),
    )


def test_what_the_ports_own_instance_aliases_is_carried_and_told(
    adapter: StackAdapter, plain_folder: Path, tmp_path: Path
) -> None:
    plain, _ = steps(adapter, PORT, plain_folder, times=1)
    kept, notes = steps(adapter, counting(tmp_path), plain_folder, times=1)
    for calls, (one, other) in enumerate(zip(plain, kept, strict=True)):
        assert torch.equal(one * (1 + calls), other)
    assert len(notes) == 1 and "steps" in notes[0] and "carried" in notes[0]


def test_an_alias_without_an_output_is_an_error(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="aliases output"):
        steps(adapter, counting(tmp_path, extra=1), plain_folder)
