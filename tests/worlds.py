"""Worlds: a folder with a model, a port and an experiment; and how commands are run in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equiport.experiment import Experiment

EXAMPLE_PORT = Path(__file__).parents[1] / "examples" / "llama" / "modeling_llama_nxdi.py"
CAUSAL, INNER, CONFIG = "NeuronLlamaForCausalLM", "NeuronLlamaModel", "LlamaInferenceConfig"
TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 131,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """A folder with a model, a port and (once validated) an experiment."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def port(self) -> Path:
        return self.root / "port" / "modeling_llama_nxdi.py"

    @property
    def exp(self) -> Path:
        return self.root / "exp"

    @property
    def experiment(self) -> Experiment:
        return Experiment.open(self.exp)

    @property
    def port_flags(self) -> list[str]:
        """The flags of seed 003 that name port and model."""
        return [
            "--model-path", str(self.model), "--model-class", f"{self.port}:{CAUSAL}",
            "--config-class", f"{self.port}:{CONFIG}",
        ]  # fmt: skip

    @property
    def stage0_flags(self) -> list[str]:
        return [
            "--source-model-path", str(self.model), "--target-model-path", str(self.model),
            "--target-module-file", str(self.port), "--target-inner-class", INNER,
            "--target-config-class", CONFIG, "--output-dir", str(self.exp / "model_tree"),
        ]  # fmt: skip

    @property
    def validate_flags(self) -> list[str]:
        return ["--port", str(self.port), "--model", str(self.model), "--out", str(self.exp)]

    def result(self, stage: int) -> dict[str, Any]:
        return json.loads((self.exp / "results" / f"stage{stage}.json").read_text())

    def edit_result(self, stage: int, **changes: object) -> None:
        """Change fields of a stored result."""
        (self.exp / "results" / f"stage{stage}.json").write_text(json.dumps({**self.result(stage), **changes}))

    def edit_config(self, **changes: object) -> None:
        """Change fields of equiv_config.json."""
        file = self.exp / "equiv_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@dataclass(frozen=True)
class Ran:
    """What a command did: exit code and what it printed."""

    code: int
    out: str
    err: str

    def is_clear_error(self, code: int, *words: str) -> bool:
        """One line on stderr that holds the words, the documented exit code, no traceback."""
        lines = self.err.strip().splitlines()
        assert self.code == code, (self.code, self.out, self.err)
        assert len(lines) == 1 and lines[0].startswith("equiport: "), self.err
        assert "internal error" not in lines[0] and "Traceback" not in self.out, (self.out, self.err)
        missing = [word for word in words if word not in lines[0]]
        assert not missing, (missing, lines[0])
        return True


Cli = Callable[..., Ran]


def equiport_command(*arguments: object, python: str = sys.executable) -> list[str]:
    """The `equiport` command of this interpreter."""
    return [python, "-c", "from equiport.cli import main; main()", *map(str, arguments)]
