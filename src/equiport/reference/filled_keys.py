"""Stored config keys that the config class fills from another key: results, which a change of that key leaves behind.

transformers 4.57 makes `rope_theta` of GPT-NeoX from `rotary_emb_base`, and saves both. EleutherAI's folders have the
second alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from equiport.reference.model import quiet_transformers


@dataclass(frozen=True)
class FilledKey:
    """A top-level key of a config.json, and what its class makes of it once another key is changed."""

    name: str
    value: Any


class FilledKeys:
    """Finds what is stale in a changed config, by building the class of the model's type with keys left out.

    `published`: keys of the source's own config.json, where `config` has more that saving added; None: all are its own.
    """

    def __init__(self, config: Mapping[str, Any], published: Collection[str] | None = None) -> None:
        self._config = dict(config)
        self._published = set(config if published is None else published)
        with quiet_transformers():
            # what the class gives anyway when the key is left out
            self._candidates = [
                name
                for name, value in config.items()
                if name != "model_type" and _of_class(self._without(name), name) == _Value(value)
            ]

    def stale(self, changed: Mapping[str, Any]) -> tuple[FilledKey, ...]:
        """Keys that `changed` leaves as they were, and that the class would make anew from what is changed in it.

        A key that wins over the one that it could be filled from (`layer_types` over an interval of layers) is the
        source's own where its config.json has it, and stays. None where the class does not give the same config
        without them all.
        """
        found = []
        with quiet_transformers():
            whole = _build(changed)
            for name in self._candidates:
                if name not in changed or changed[name] != self._config[name]:
                    continue
                made = _of_class({key: value for key, value in changed.items() if key != name}, name)
                if made is None or made == _Value(self._config[name]):
                    continue
                if _attribute(whole, name) == made or name not in self._published:
                    found.append(FilledKey(name, made.plain))
            if not found or not _same(_build(self._config), _build(self._without(*(key.name for key in found)))):
                return ()
        return tuple(found)

    def _without(self, *names: str) -> dict[str, Any]:
        return {key: value for key, value in self._config.items() if key not in names}


@dataclass(frozen=True)
class _Value:
    """A value as config.json can hold it."""

    plain: Any


def _build(values: Mapping[str, Any]) -> Any | None:
    """The config as `from_pretrained` makes it of a config.json; None where transformers refuses it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        # classes change nested values in place
        return CONFIG_MAPPING[values["model_type"]].from_dict(json.loads(json.dumps(values)))
    except Exception:  # config classes raise all kinds
        return None


def _attribute(config: Any | None, name: str) -> _Value | None:
    """An attribute, aliases of the class's `attribute_map` included; None: there is none that a file could hold."""
    try:
        return _Value(json.loads(json.dumps(getattr(config, name))))
    except Exception:  # some attributes raise errors of their own: a value for each layer has no common one
        return None


def _of_class(values: Mapping[str, Any], name: str) -> _Value | None:
    config = _build(values)
    return None if config is None else _attribute(config, name)


def _same(one: Any | None, other: Any | None) -> bool:
    return one is not None and other is not None and bool(one.to_dict() == other.to_dict())
