"""Load the source model from its HF folder, or make a fixture folder of the same architecture."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from equiport.errors import EquiportError
from equiport.fixtures.folder import has_weights, read_config, tensor_headers
from equiport.fixtures.tiny_config import tiny_config
from equiport.fixtures.weights import WeightKind, draw_weights
from equiport.reference.key_layout import check_same, layout_for, part_of_whole, store_as
from equiport.reference.names import attribute_names

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

# names of a causal LM that is no part of another model
_USUAL = ("model.", "transformer.", "lm_head.")


@dataclass(frozen=True)
class Fixture:
    """A folder that reference and port both load. `tiny` says whether its dimensions are shrunk."""

    folder: Path
    kind: WeightKind
    seed: int
    tiny: bool
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For names of comparisons."""
        return self.kind.value if self.kind is WeightKind.REAL else f"{self.kind.value}-{self.seed}"


def load_reference(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The source model in `dtype`, eager attention, eval mode, on the CPU; in float32 all of it.

    Raises:
        EquiportError: unknown architecture, missing or damaged weights, missing keys.
    """
    from transformers import AutoModelForCausalLM

    read_config(folder)
    stored = [header.name for header in tensor_headers(folder)]
    part = None
    if not any(name.startswith(_USUAL) for name in stored):
        shape: Any = skeleton(folder)
        part = part_of_whole(folder, shape)
    with quiet_transformers():
        try:
            options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
            loaded: Any = (
                AutoModelForCausalLM.from_pretrained(str(folder), **options)
                if part is None
                else type(shape).from_pretrained(None, config=shape.config, state_dict=part, **options)
            )
        except Exception as error:  # config validation and models' constructors raise all kinds
            raise EquiportError(
                f"transformers cannot load it: {_first_line(error)}",
                where=folder,
                remedy="Check config.json and weights.",
            ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise EquiportError(
            f"weights lack {len(missing)} tensors, first {missing[0]}",
            where=folder,
            remedy="Complete the weights: a reference with random tensors proves nothing.",
        )
    if dtype is torch.float32:
        model.float()  # what a constructor makes in another dtype would stay in it
    return model.eval()


def skeleton(folder: Path) -> nn.Module:
    """The source model's structure on the meta device: no weights, no memory.

    Raises:
        EquiportError: transformers does not know the architecture or a config field is missing or wrong.
    """
    from transformers import AutoModelForCausalLM

    config = _auto_config(folder)
    with quiet_transformers():
        try:
            try:
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            except NotImplementedError:  # a constructor reads the value of a tensor
                with _parameters_on_meta():
                    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        except Exception as error:  # whatever a model's constructor makes of a faulty config
            raise _refused("transformers cannot build it", error, config.to_dict(), folder) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are built keep their buffers; each parameter loses its memory as soon as it is registered."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        kept = None if value is None else nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
        register(module, name, kept)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(
    source: Path, target: Path, kind: WeightKind, seed: int, *, tiny: bool, square: bool = False, deep: bool = False
) -> Fixture:
    """Write a fixture folder with drawn weights, stored under names as in `source` (reference/key_layout.py), else as
    `save_pretrained` does.

    `tiny` shrinks the dimensions first, with `deep` not the number of layers; otherwise the model's own config is used
    whole.

    Raises:
        EquiportError: the architecture is unknown or the config cannot be shrunk.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = read_config(source)
    names = attribute_names(str(raw.get("model_type", "")))
    shrunk = tiny_config(raw, square=square, aliases=names, deep=deep) if tiny else None
    config = _config_from(shrunk.config if shrunk else raw, source)
    torch.manual_seed(seed)
    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        except Exception as error:
            raise _refused("transformers cannot build a fixture of it", error, config.to_dict(), source) from error
        tied = bool(getattr(config, "tie_word_embeddings", False))
        model.load_state_dict(draw_weights(model.state_dict(), kind, seed, tied=tied, fixed=constants(model)))
    with _staged(target) as staging:
        with quiet_transformers():
            model.save_pretrained(str(staging), safe_serialization=True)
        layout = layout_for(source, model)
        if not layout.is_plain:
            store_as(staging, layout)
        # the port must read the same keys as in the user's own config.json, whatever this transformers renames
        saved = json.loads((staging / "config.json").read_text(encoding="utf-8"))
        merged = {**saved, **(shrunk.config if shrunk else raw)}
        (staging / "config.json").write_text(json.dumps(merged, indent=2), encoding="utf-8")
        with quiet_transformers():
            AutoConfig.from_pretrained(str(staging))
        if not layout.is_plain:
            check_same(model, load_reference(staging, torch.float32), target)
    return Fixture(target, kind, seed, tiny, shrunk.notes if shrunk else ())


def constants(model: nn.Module) -> list[str]:
    """Names of buffers of one number (an activation's beta): training does not move them."""
    return [name for name, buffer in model.named_buffers() if buffer.dim() == 0]


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """A folder that becomes `target`, replacing it whole, when the block ends well; else nothing is left of it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise EquiportError(f"cannot be written: {error.strerror}", where=target, remedy="Check the folder.") from error
    try:
        yield staging
        staging.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
    except (OSError, SafetensorError) as error:
        said = getattr(error, "strerror", None) or _first_line(error)
        raise EquiportError(f"cannot be written: {said}", where=target, remedy="Free some disk space.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def real_fixture(folder: Path) -> Fixture:
    """The model's own folder as a fixture.

    Raises:
        EquiportError: it has no weights.
    """
    if not has_weights(folder):
        raise EquiportError("holds no *.safetensors weights", where=folder, remedy="Add the weights.")
    return Fixture(folder, WeightKind.REAL, 0, tiny=False)


def _auto_config(folder: Path) -> Any:
    return _config_from(read_config(folder), folder)


def _config_from(raw: dict[str, Any], where: Path) -> Any:
    from transformers import AutoConfig

    values = dict(raw)
    model_type = values.pop("model_type", None)
    if not model_type:
        raise EquiportError("missing", where=where / "config.json", field="model_type", remedy="Add the model_type.")
    values.pop("quantization_config", None)
    try:
        with quiet_transformers():
            return AutoConfig.for_model(model_type, **values)
    except Exception as error:  # transformers 5 has validation errors of its own, which are no ValueErrors
        raise _refused("transformers refuses it", error, raw, where) from error


def _refused(what: str, error: BaseException, values: dict[str, Any], folder: Path) -> EquiportError:
    """One line for a config that transformers does not take, with the field where it can be told."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    named = re.search(r"field '(\w+)'", said)
    field = named[1] if named else ""
    if isinstance(error, KeyError) and error.args:
        said = f"it knows no {said}"
        field = next((key for key, value in values.items() if _holds(value, error.args[0])), "")
    return EquiportError(f"{what}: {said}", where=folder / "config.json", field=field, remedy="Check the config.")


def _holds(value: Any, wanted: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(value == wanted) or any(_holds(item, wanted) for item in inner)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the screen; errors are raised, not logged."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    bars = getattr(hf_logging, "is_progress_bar_enabled", lambda: True)()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
