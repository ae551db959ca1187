"""A Messages API on loopback whose model is a function: `script(Ask) -> Answer`. Nothing else is served.

The function is pure: it sees the whole conversation in each request, so a request sent again gets the same answer.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_numbers = itertools.count(1)


def call(tool: str, /, **given: Any) -> dict[str, Any]:
    """A tool call in an answer."""
    return {"type": "tool_use", "id": f"toolu_{next(_numbers):08d}", "name": tool, "input": given}


def say(text: str) -> dict[str, Any]:
    """Text in an answer."""
    return {"type": "text", "text": text}


@dataclass(frozen=True)
class Answer:
    """What the model answers. `broken`: after how many events the connection is cut; `raw`: sent instead of events."""

    content: list[dict[str, Any]]
    stop_reason: str = ""
    tokens_in: int = 1000
    tokens_out: int = 100
    status: int = 200
    broken: int | None = None
    raw: str = ""
    wait: float = 0.0


@dataclass(frozen=True)
class Ask:
    """One request. `turn`: how often the model has answered in this conversation."""

    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def turn(self) -> int:
        return sum(message["role"] == "assistant" for message in self.body["messages"])

    @property
    def system(self) -> str:
        return "\n".join(part["text"] for part in _parts(self.body.get("system")))

    @property
    def tools(self) -> list[str]:
        return [tool["name"] for tool in self.body.get("tools", [])]

    @property
    def task(self) -> str:
        """All text before the model's first answer."""
        texts = []
        for message in self.body["messages"]:
            if message["role"] == "assistant":
                break
            texts += [part["text"] for part in _parts(message["content"]) if part["type"] == "text"]
        return "\n".join(texts)

    @property
    def job(self) -> str:
        """What follows `Job: ` in the task, up to the end of the line."""
        found = re.search(r"^Job: (.*)$", self.task, re.MULTILINE)
        return found[1] if found else ""

    @property
    def results(self) -> list[tuple[bool, str]]:
        """(is an error, text) of the tool results since the model's last answer."""
        found: list[tuple[bool, str]] = []
        for message in reversed(self.body["messages"]):
            if message["role"] == "assistant":
                break
            for part in _parts(message["content"]):
                if part["type"] == "tool_result":
                    text = "\n".join(item.get("text", "") for item in _parts(part.get("content")))
                    found.append((bool(part.get("is_error")), text))
        return found

    @property
    def said(self) -> list[tuple[bool, str]]:
        """Tool results of the whole conversation."""
        return [
            (bool(part.get("is_error")), "\n".join(item.get("text", "") for item in _parts(part.get("content"))))
            for message in self.body["messages"]
            if message["role"] != "assistant"
            for part in _parts(message["content"])
            if part["type"] == "tool_result"
        ]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [say(content)] if isinstance(content, str) else list(content or [])


Script = Callable[[Ask], "Answer | list[dict[str, Any]] | str"]


@dataclass
class Loopback:
    """The server, as a context. `asks`: requests for an answer; `others`: all others; `faults`: of the script."""

    script: Script
    asks: list[Ask] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Loopback:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, ask: Ask) -> Answer:
        self.asks.append(ask)
        try:
            made = self.script(ask)
        except Exception as error:  # a 400 is not sent again, so the test fails fast
            self.faults.append(f"{type(error).__name__}: {error}")
            return Answer([], status=400)
        if isinstance(made, str):
            made = [say(made)]
        return Answer(made) if isinstance(made, list) else made


def _handler(server: Loopback) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *given: Any) -> None:
            """Nothing is logged."""

        def _other(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            server.others.append(f"{self.command} {self.path}")
            self._json(404, {"type": "error", "error": {"type": "not_found_error", "message": self.path}})

        do_GET = do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _other

        def do_POST(self) -> None:
            if self.path.partition("?")[0] != "/v1/messages":
                return self._other()
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
            made = server.answer(Ask(body, {name.lower(): value for name, value in self.headers.items()}))
            time.sleep(made.wait)
            try:
                if made.status != 200:
                    kind = {429: "rate_limit_error", 401: "authentication_error"}.get(made.status, "api_error")
                    self._json(made.status, {"type": "error", "error": {"type": kind, "message": "as scripted"}})
                else:
                    self._stream(body, made)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _stream(self, body: dict[str, Any], made: Answer) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            events = [f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in _events(body, made)]
            text = made.raw or "".join(events[: made.broken])
            self.wfile.write(text.encode())
            self.wfile.flush()

    return Handler


def _events(body: dict[str, Any], made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
    calls = any(part["type"] == "tool_use" for part in made.content)
    usage = {"input_tokens": made.tokens_in, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    message = {
        "id": f"msg_{next(_numbers):08d}", "type": "message", "role": "assistant", "model": body.get("model", ""),
        "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1},
    }  # fmt: skip
    yield "message_start", {"type": "message_start", "message": message}
    for index, part in enumerate(made.content):
        if part["type"] == "text":
            start, delta = say(""), {"type": "text_delta", "text": part["text"]}
        else:
            start = {**part, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": start}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    reason = made.stop_reason or ("tool_use" if calls else "end_turn")
    yield (
        "message_delta",
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": made.tokens_out},
        },
    )
    yield "message_stop", {"type": "message_stop"}
