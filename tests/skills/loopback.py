"""A Messages API on 127.0.0.1 whose replies are scripted: what an agent CLI asks, and tool calls in answer.

A script is a function of the request's body, so a repeated request gets the same answer.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Block = dict[str, Any]
_NUMBERS = itertools.count(1)
Script = Callable[["Asked"], "list[Block] | str"]


def says(text: str) -> Block:
    return {"type": "text", "text": text}


def calls(tool: str, /, **given: Any) -> Block:
    return {"type": "tool_use", "id": f"toolu_{next(_NUMBERS):06d}", "name": tool, "input": given}


class Asked:
    """One request: `turn` counts the assistant's messages so far."""

    def __init__(self, body: dict[str, Any], agent: str) -> None:
        self.body, self.agent = body, agent
        self.messages = body.get("messages", [])
        self.turn = sum(message["role"] == "assistant" for message in self.messages)

    @property
    def answers(self) -> list[str]:
        """Texts of the tool results that came after the last reply, and of what came with them."""
        found: list[str] = []
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                break
            content = message["content"]
            blocks = [says(content)] if isinstance(content, str) else content
            found = [text for block in blocks for text in _texts(block)] + found
        return found


def _texts(block: Block) -> Iterator[str]:
    content = block.get("text") if block["type"] == "text" else block.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for item in content:
            yield from _texts(item)


class Loopback:
    """The server. `asked`: every request for messages; `other`: every other request; `faults`: a script that raised."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.other: list[str] = []
        self.faults: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def _send(self, status: int, kind: str, data: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.send_header("connection", "close")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _elsewhere(self) -> None:
                outer.other.append(f"{self.command} {self.path}")
                self._send(404, "application/json", b"{}")

            do_GET = do_HEAD = do_PUT = do_DELETE = _elsewhere

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                if self.path.split("?")[0] != "/v1/messages":
                    self._elsewhere()
                    return
                asked = Asked(body, self.headers.get("x-claude-code-agent-id") or "")
                outer.asked.append(asked)
                try:
                    reply = outer.script(asked)
                except Exception as error:
                    outer.faults.append(f"{type(error).__name__}: {error}")
                    text = {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}}
                    self._send(400, "application/json", json.dumps(text).encode())
                    return
                blocks = [says(reply)] if isinstance(reply, str) else reply
                stream = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in _events(body, blocks))
                self._send(200, "text/event-stream", stream.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Loopback:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _events(body: dict[str, Any], blocks: list[Block]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {"input_tokens": 100, "output_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    stop = "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
    message = {
        "id": f"msg_{next(_NUMBERS):06d}",  # replies of one id are merged by the CLI
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "scripted"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    yield "message_start", {"type": "message_start", "message": message}
    for place, block in enumerate(blocks):
        tool = block["type"] == "tool_use"
        start = {**block, "input": {}} if tool else says("")
        delta = (
            {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            if tool
            else {"type": "text_delta", "text": block["text"]}
        )
        yield "content_block_start", {"type": "content_block_start", "index": place, "content_block": start}
        yield "content_block_delta", {"type": "content_block_delta", "index": place, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": place}
    yield "message_delta", {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None},
                            "usage": {"output_tokens": 10}}  # fmt: skip
    yield "message_stop", {"type": "message_stop"}
