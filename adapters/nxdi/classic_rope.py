"""Gives ports the rope fields of transformers 4.57, which they are written for, from configs written by transformers 5.

transformers 5 keeps them in `rope_parameters`. A port that reads config.json by hand would silently take its own
default for a `rope_theta` that it does not find, and would be called wrong for it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def classic_rope_fields(rope: Any) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling`, `partial_rotary_factor` and `rope_local_base_freq`, as far as `rope` tells them."""
    if not isinstance(rope, Mapping):
        return {}
    if isinstance(rope.get("full_attention"), Mapping):
        fields = classic_rope_fields(rope["full_attention"])
        local = rope.get("sliding_attention")
        if isinstance(local, Mapping) and "rope_theta" in local:
            fields["rope_local_base_freq"] = local["rope_theta"]
        return fields
    if "rope_theta" not in rope:
        return {}
    lifted = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {**lifted, "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}


def with_classic_rope(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `load_config` function of NxDI that adds the classic fields where the config has none."""

    def load_config(config: Any) -> None:
        load(config)
        for name, value in classic_rope_fields(config.__dict__.get("rope_parameters")).items():
            if config.__dict__.get(name) is None:
                config.__dict__[name] = value

    return load_config


@contextmanager
def classic_folder(folder: Path) -> Iterator[Path]:
    """The folder itself, or for the time being one that links to its files, with the classic fields in config.json."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    added = {
        name: value
        for name, value in classic_rope_fields(content.get("rope_parameters")).items()
        if content.get(name) is None
    }
    if not added:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="equiport-config-") as shadow:
        for file in folder.iterdir():
            if file.name != "config.json":
                (Path(shadow) / file.name).symlink_to(file.resolve())
        (Path(shadow) / "config.json").write_text(json.dumps({**content, **added}), encoding="utf-8")
        yield Path(shadow)
