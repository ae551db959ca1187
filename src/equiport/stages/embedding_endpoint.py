"""A target behind an OpenAI-compatible `/v1/embeddings` (vLLM with `--runner pooling`)."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equiport.errors import EquiportError
from equiport.fixtures.embedding_plan import EmbeddingItem, EmbeddingPlan
from equiport.stages.embedding_targets import TargetVectors, run_plan

_PATH = "/v1/embeddings"
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is for the address that was given."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        """Never followed: the answer's status is told instead."""


@dataclass(frozen=True)
class EndpointTarget:
    """`url`: the server's root, its /v1 or the endpoint. `model`: as served; empty where the server has one alone.

    `token_ids`: send ids, so that the server's tokenizer is left out. `key_env`: the variable that holds a key.
    """

    url: str
    model: str = ""
    token_ids: bool = False
    key_env: str = ""
    timeout: float = 120.0
    files: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """Server and model; what a URL may hold of a user's secrets is left out."""
        parts = urllib.parse.urlsplit(self._root())
        place = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
        return f"endpoint {parts.scheme}://{place}{parts.path}{_PATH}" + (f" ({self.model})" if self.model else "")

    def vectors(self, plan: EmbeddingPlan) -> TargetVectors:
        """One request a prompt, then one a batch.

        Raises:
            EquiportError: not reachable, refused, or an answer of another form or with another number of vectors.
        """
        model = self.model or self._only_model()
        counts: dict[tuple[int, ...], int] = {}

        def embed(batch: Sequence[EmbeddingItem]) -> Tensor:
            given = [list(item.ids) if self.token_ids or item.text is None else item.text for item in batch]
            one_kind = all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given)
            if not one_kind:
                given = [list(item.ids) for item in batch]
            answer = self._ask(_PATH, {"model": model, "input": given, "encoding_format": "float"})
            used = answer.get("usage")
            if len(batch) == 1 and isinstance(used, dict) and isinstance(used.get("prompt_tokens"), int):
                counts[batch[0].ids] = used["prompt_tokens"]
            return self._rows(answer, len(batch))

        found = run_plan(plan, embed)
        notes = []
        for label, item in zip(plan.labels, plan.items, strict=True):
            if counts.get(item.ids, len(item.ids)) != len(item.ids):
                notes.append(
                    f"the server counted {counts[item.ids]} tokens where the source's tokenizer makes {len(item.ids)} "
                    f"(prompt {label}): its tokenizer, or the special tokens it adds, differ"
                )
                break
        blind = [
            "whether the server ran the prompts of one request in one forward, and without its prefix cache, which may "
            "answer a batch by what it computed alone"
        ]
        if self.token_ids:
            blind.append("the server's tokenizer: token ids were sent")
        return replace(found, notes=tuple(notes), blind_spots=tuple(blind))

    def _rows(self, answer: dict[str, Any], rows: int) -> Tensor:
        data = answer.get("data")
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            raise self._wrong("holds no list `data`")
        places = [item.get("index", number) for number, item in enumerate(data)]
        if sorted(map(str, places)) != sorted(map(str, range(rows))):
            raise self._wrong(f"holds vectors {places[:9]} for {rows} prompts")
        ordered = [
            item.get("embedding") for _, item in sorted(zip(places, data, strict=True), key=lambda pair: pair[0])
        ]
        if not all(isinstance(vector, list) and vector for vector in ordered):
            raise self._wrong("holds an embedding that is no list of numbers")
        try:
            # servers write NaN as null where they must write valid JSON
            numbers = [[float("nan") if value is None else float(value) for value in vector] for vector in ordered]
            return torch.tensor(numbers, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise self._wrong(f"holds vectors of unequal width, or no numbers ({error})") from None

    def _only_model(self) -> str:
        data = self._ask("/v1/models", None).get("data")
        names = [item.get("id") for item in data if isinstance(item, dict)] if isinstance(data, list) else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise EquiportError(
                f"serves {len(names)} models", where=self.url, field="--served-model", remedy="Name the model."
            )
        return names[0]

    def _root(self) -> str:
        root = self.url.strip().rstrip("/")
        parts = urllib.parse.urlsplit(root)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise EquiportError(
                "is no http(s) address", where=self.url, field="--url", remedy="Write http://HOST:PORT."
            )
        return root.removesuffix("/embeddings").removesuffix("/v1")

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_env:
            key = os.environ.get(self.key_env)
            if not key:
                raise EquiportError("is not set", field=self.key_env, remedy="Export the server's key in it.")
            headers["Authorization"] = f"Bearer {key}"
        address = self._root() + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address, data, headers)
        local = urllib.parse.urlsplit(address).hostname in _LOOPBACK
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        handlers += [urllib.request.ProxyHandler({})] if local else []
        try:
            with urllib.request.build_opener(*handlers).open(request, timeout=self.timeout) as stream:
                answer = json.loads(stream.read())
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            raise EquiportError(f"answers {error.code}: {said}", where=address, remedy="Check the server.") from None
        except (urllib.error.URLError, OSError) as error:
            why = getattr(error, "reason", None) or error
            raise EquiportError(f"does not answer: {why}", where=address, remedy="Is the server up?") from None
        except ValueError as error:
            raise EquiportError(f"answers no JSON: {error}", where=address, remedy="Check the address.") from None
        if not isinstance(answer, dict):
            raise EquiportError("answers no JSON object", where=address, remedy="Check the address.")
        return answer

    def _wrong(self, what: str) -> EquiportError:
        return EquiportError(f"its answer {what}", where=self._root() + _PATH, remedy="Is it an embeddings endpoint?")
