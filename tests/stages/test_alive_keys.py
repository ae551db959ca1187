"""Config keys from which a class fills others, and aliases: ports that follow are quiet, deaf ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_ports import EXAMPLE, replaced
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from worlds import TINY_LLAMA

from equiport.compare.gates_consistency import Nudge, alive_gate
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages.alive import nudge_all

_LOADED = "return cls(settings, load_config=load_pretrained_config(model_path), **kwargs)"
_RAW = (
    "import json\n        fields = json.loads(open(os.path.join(model_path, 'config.json')).read())\n"
    "        fields['rms_norm_eps'] = fields.get('rms_norm_eps', {default})\n"
    "        fields.setdefault('rope_scaling', None)\n        return cls(settings, **fields)"
)
_EPS = "eps=config.rms_norm_eps)"


class FilledConfig(LlamaConfig):
    """Fills rms_norm_eps from norm_base, whatever the file has for it."""

    model_type = "llama_norm_base"

    def __init__(self, norm_base: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm_base = norm_base
        self.rms_norm_eps = norm_base


class AliasConfig(LlamaConfig):
    """Takes norm_epsilon for rms_norm_eps."""

    model_type = "llama_norm_alias"
    attribute_map = {"norm_epsilon": "rms_norm_eps"}


class FilledLlama(LlamaForCausalLM):
    config_class = FilledConfig


class AliasLlama(LlamaForCausalLM):
    config_class = AliasConfig


class FarConfig(LlamaConfig):
    """Louder tokens from position far_floor on; max_length and far_width move nothing."""

    model_type = "llama_far"

    def __init__(self, far_floor: int = 8192, far_width: int = 4096, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.far_floor, self.far_width = far_floor, far_width


class FarLlama(LlamaForCausalLM):
    config_class = FarConfig

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        far = torch.arange(embedded.shape[1]) >= self.config.far_floor
        return super().forward(inputs_embeds=torch.where(far[:, None], 3 * embedded, embedded), **kwargs)


_KEYS = {"llama_norm_base": "norm_base", "llama_norm_alias": "norm_epsilon"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By type: a fixture folder whose config.json has the key, and what saving adds."""
    for config, model in ((FilledConfig, FilledLlama), (AliasConfig, AliasLlama), (FarConfig, FarLlama)):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("sources")
    for kind in _KEYS:
        (root / kind).mkdir()
        (root / kind / "config.json").write_text(json.dumps(_published(kind)))
        made = materialize(root / kind, root / f"{kind}-model", WeightKind.PERTURBED, 3, tiny=False).folder
        assert {_KEYS[kind], "rms_norm_eps"} <= set(json.loads((made / "config.json").read_text()))
    return {kind: root / f"{kind}-model" for kind in _KEYS}


def _published(kind: str) -> dict[str, Any]:
    rest = {key: value for key, value in TINY_LLAMA.items() if key != "rms_norm_eps"}
    return {**rest, "num_hidden_layers": 1, "model_type": kind, _KEYS[kind]: 1e-5}


def _nudged(kind: str, folder: Path, port: Path, edit: Callable[[str], str], own: bool = True) -> list[Nudge]:
    file = port / "modeling_llama_nxdi.py"
    file.write_text(edit(EXAMPLE.read_text()))
    published = _published(kind) if own else None
    return nudge_all(load_adapter("nxdi"), find_port_classes(file), folder, 42, published=published)


def _raw(default: str) -> tuple[str, str]:
    return _LOADED, _RAW.format(default=default)


@pytest.mark.parametrize("kind", _KEYS)
@pytest.mark.parametrize(
    "edit,says",
    [
        (lambda source: source, None),
        (replaced((_EPS, "eps=1e-5)")), ""),
        (replaced(_raw("1e-5")), "the port reads the file itself"),
        (replaced(_raw("1e-2")), "the port reads the file itself"),
        (replaced(_raw("None"), (_EPS, "eps=1e-5 if config.rms_norm_eps else 1 / 0)")), ""),
    ],
    ids=["follows", "hard-coded", "own default", "another default", "hard-coded and refuses without"],
)
def test_filled_keys(
    kind: str, edit: Callable[[str], str], says: str | None, sources: dict[str, Path], tmp_path: Path
) -> None:
    nudges = _nudged(kind, sources[kind], tmp_path, edit)
    gate = alive_gate(nudges, Thresholds())
    nudge = next(item for item in nudges if item.name == _KEYS[kind])
    named = {reason.subject: reason.message for reason in gate.reasons if reason.code == "UNREAD_KEY"}
    assert nudge.reference > Thresholds().alive
    if says is None:
        assert gate.verdict is Verdict.PASS and nudge.filled == ("rms_norm_eps",), gate
        assert nudge.target == pytest.approx(nudge.reference, rel=0.02)
    else:
        assert gate.verdict is Verdict.FAIL and says in named[_KEYS[kind]], gate
        assert bool(says) == ("reads the file itself" in named[_KEYS[kind]])


@pytest.mark.parametrize("edit,deaf", [(str, False), (replaced(_raw("1e-2")), True)], ids=["follows", "own default"])
def test_a_folder_that_has_both_is_judged_alike(
    edit: Callable[[str], str], deaf: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    kind = "llama_norm_base"
    gate = alive_gate(_nudged(kind, sources[kind], tmp_path, edit, own=False), Thresholds())
    assert gate.verdict is (Verdict.FAIL if deaf else Verdict.PASS)
    assert {reason.subject for reason in gate.reasons} == ({"norm_base"} if deaf else set())


_FAR = (
    ("        self.embed_tokens = ParallelEmbedding(", "        self.embed_tokens = FarEmbedding("),
    (
        "        self.layers = nn.ModuleList(",
        "        self.embed_tokens.floor = {floor}\n        self.layers = nn.ModuleList(",
    ),
    (
        "class NeuronLlamaModel(NeuronBaseModel):",
        "class FarEmbedding(ParallelEmbedding):\n"
        "    def forward(self, ids):\n        embedded = super().forward(ids)\n"
        "        far = torch.arange(embedded.shape[1]) >= self.floor\n"
        "        return torch.where(far[:, None], 3 * embedded, embedded)\n\n\n"
        "class NeuronLlamaModel(NeuronBaseModel):",
    ),
)


@pytest.mark.parametrize(
    "own,read,said",
    [
        (8192, "config.far_floor", "blind"),
        (8192, "8192", "unread"),
        (8, "config.far_floor", ""),
        (8, "8", "unread"),
    ],
)
def test_a_limit_that_no_prompt_reaches(
    own: int, read: str, said: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """It is named where the port reads it, and a port that does not read it fails, as with a limit in reach."""
    (tmp_path / "source").mkdir()
    values = {**TINY_LLAMA, "num_hidden_layers": 1, "model_type": "llama_far", "far_floor": own, "far_width": 4096}
    (tmp_path / "source" / "config.json").write_text(json.dumps(values))
    folder = materialize(tmp_path / "source", tmp_path / "model", WeightKind.PERTURBED, 3, tiny=False).folder
    file = tmp_path / "modeling_llama_nxdi.py"
    file.write_text(replaced(*((old, new.replace("{floor}", read)) for old, new in _FAR))(EXAMPLE.read_text()))
    nudges = nudge_all(load_adapter("nxdi"), find_port_classes(file), folder, 42, published=values)
    gate = alive_gate(nudges, Thresholds())
    assert not {"far_width", "max_position_embeddings"} & {nudge.name for nudge in nudges}
    assert [nudge.limit for nudge in nudges if nudge.name == "far_floor"] == [own if own == 8192 else None]
    blind = {spot.subject: spot.message for spot in gate.blind_spots}
    assert ("far_floor" in blind) == (said == "blind") and (said != "blind" or "= 8192" in blind["far_floor"]), blind
    assert gate.verdict is (Verdict.FAIL if said == "unread" else Verdict.PASS), gate.reasons
    assert {reason.subject for reason in gate.reasons} == ({"far_floor"} if said == "unread" else set())
