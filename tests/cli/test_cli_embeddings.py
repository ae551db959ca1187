"""`equiport embeddings` against a server on loopback, against files, and with bad input."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from worlds import Cli, Ran

from equiport import cli as command_line

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))
from embedding_world import Port, last, write_model, write_modules, write_prompts

Answer = Callable[[list[Any], Any], dict[str, Any]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The command in this process."""
    torch.set_num_threads(1)
    monkeypatch.setattr(os, "_exit", lambda code: None)

    def made(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["equiport", "embeddings", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command_line.main()
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 as a last-token encoder, prompts beside it."""
    root = tmp_path_factory.mktemp("endpoint")
    write_prompts(root / "prompts.txt")
    return write_modules(write_model(root / "model", "qwen3"), "lasttoken", normalize=True)


class Server:
    """An embeddings endpoint: `answer(inputs, vectors)` makes the body of a reply from what was asked."""

    def __init__(self, folder: Path, port: Port, answer: Answer | None = None, key: str = "") -> None:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *given: Any) -> None:
                """Nothing is logged."""

            def _send(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self._send(200, {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                if key and self.headers.get("Authorization") != f"Bearer {key}":
                    return self._send(401, {"error": "no key"})
                if self.path != "/v1/embeddings" or body["model"] != "tiny":
                    return self._send(404, {"error": "no such model"})
                ids = [tokenizer(item)["input_ids"] if isinstance(item, str) else item for item in body["input"]]
                vectors = port(ids)
                made = answer(ids, vectors) if answer else reply(ids, vectors)
                return self._send(200, made)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def reply(ids: list[Any], vectors: torch.Tensor) -> dict[str, Any]:
    """What an OpenAI-compatible server says, in another order than it was asked."""
    data = [{"index": number, "embedding": row.tolist()} for number, row in enumerate(vectors)]
    return {"object": "list", "data": data[::-1], "usage": {"prompt_tokens": sum(map(len, ids))}}


@pytest.fixture(scope="module")
def right(model: Path) -> Iterator[Server]:
    with Server(model, Port(model, last)) as server:
        yield server


def test_a_right_server_passes(run: Callable[..., Ran], model: Path, right: Server, tmp_path: Path) -> None:
    """With the prompts that ship."""
    ran = run(model, "--url", right.url, "--out", tmp_path)
    assert ran.code == 0, ran.out + ran.err
    assert "PASS: 16 prompts" in ran.out
    result = json.loads((tmp_path / "embeddings.json").read_text())
    assert result["verdict"] == "PASS" and len(result["comparison"]["prompts"]) == 16
    assert {len(body["input"]) for body in right.asked} == {1, 8}
    assert all(isinstance(item, str) for body in right.asked for item in body["input"])
    assert "127.0.0.1" in (tmp_path / "EMBEDDINGS.md").read_text()


def test_token_ids_and_a_key(
    run: Callable[..., Ran], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = model.parent / "prompts.txt"
    monkeypatch.setenv("SERVER_KEY", "secret-word")
    with Server(model, Port(model, last), key="secret-word") as server:
        ran = run(model, "--url", f"{server.url}/v1", "--prompts", prompts, "--out", tmp_path / "a", "--token-ids")
        ran.is_clear_error(2, "401")
        more = ("--token-ids", "--key-env", "SERVER_KEY", "--served-model", "tiny")
        ran = run(model, "--url", f"{server.url}/v1/embeddings", "--prompts", prompts, "--out", tmp_path, *more)
        assert ran.code == 0, ran.out + ran.err
        assert all(isinstance(item, list) for item in server.asked[-1]["input"])
    assert "secret-word" not in (tmp_path / "embeddings.json").read_text()


def test_a_server_that_forgets_the_last_token(run: Callable[..., Ran], model: Path, tmp_path: Path) -> None:
    """A tokenizer that does not add </s>: the embedding fails, and the count of tokens says why."""
    port = Port(model, last)

    def without(ids: list[Any]) -> torch.Tensor:
        return port([row[:-1] for row in ids])

    def answer(ids: list[Any], vectors: torch.Tensor) -> dict[str, Any]:
        return {**reply(ids, vectors), "usage": {"prompt_tokens": sum(len(row) - 1 for row in ids)}}

    with Server(model, without, answer) as server:  # type: ignore[arg-type]
        ran = run(model, "--url", server.url, "--prompts", model.parent / "prompts.txt", "--out", tmp_path)
    assert ran.code == 1 and "EMBEDDING_COSINE" in ran.out
    assert "special tokens it adds, differ" in ran.out


def test_null_in_a_vector_fails(run: Callable[..., Ran], model: Path, tmp_path: Path) -> None:
    def answer(ids: list[Any], vectors: torch.Tensor) -> dict[str, Any]:
        made = reply(ids, vectors)
        made["data"][0]["embedding"][3] = None
        return made

    with Server(model, Port(model, last), answer) as server:
        ran = run(model, "--url", server.url, "--prompts", model.parent / "prompts.txt", "--out", tmp_path)
    assert ran.code == 1 and "NON_FINITE_METRIC" in ran.out


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "one vector is missing": (lambda made: {**made, "data": made["data"][1:]}, "for 1 prompts"),
    "one index twice": (lambda made: {"data": made["data"] * 2}, "holds vectors [0, 0]"),
    "no vectors": (lambda made: {"error": "busy"}, "no list `data`"),
    "text": (lambda made: {"data": [{"index": 0, "embedding": "AAAA"}]}, "no list of numbers"),
    "no object": (lambda made: [1], "no JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers_are_one_line(run: Callable[..., Ran], model: Path, tmp_path: Path, name: str) -> None:
    broken, said = BROKEN[name]
    with Server(model, Port(model, last), lambda ids, vectors: broken(reply(ids, vectors))) as server:
        ran = run(model, "--url", server.url, "--prompts", model.parent / "prompts.txt", "--out", tmp_path)
    ran.is_clear_error(2, said)
    assert not (tmp_path / "embeddings.json").exists()


def test_plan_and_file(run: Callable[..., Ran], model: Path, tmp_path: Path) -> None:
    """What a user of another stack does, by hand, with the plan alone."""
    prompts = ("--prompts", model.parent / "prompts.txt")
    assert run(model, "--write-plan", tmp_path / "plan.json", *prompts).code == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    port = Port(model, last)
    ids = [item["ids"] for item in plan["prompts"]]
    vectors = {"alone": torch.cat([port([row]) for row in ids])}
    for name in ("batched", "swapped"):
        vectors[name] = torch.zeros_like(vectors["alone"])
    for batch in plan["batches"]:
        vectors["batched"][batch] = port([ids[row] for row in batch])
        for kept in (0, 1):
            rows = [
                ids[row] if place % 2 == kept or plan["variants"][row] is None else plan["variants"][row]["ids"]
                for place, row in enumerate(batch)
            ]
            vectors["swapped"][batch[kept::2]] = port(rows)[kept::2]
    file = tmp_path / "vectors.safetensors"
    save_file(vectors, str(file), metadata={"plan": plan["digest"]})
    ran = run(model, "--file", file, *prompts, "--out", tmp_path / "out")
    assert ran.code == 0, ran.out + ran.err
    save_file({**load_file(str(file)), "alone": vectors["alone"].roll(1, 0)}, str(file), {"plan": plan["digest"]})
    ran = run(model, "--file", file, *prompts, "--out", tmp_path / "out")
    assert ran.code == 1
    result = json.loads((tmp_path / "out" / "embeddings.json").read_text())
    assert {item["code"] for item in result["reasons"]} == {
        "EMBEDDING_COSINE",
        "CONFUSED",
        "BATCH_DEPENDENT",
        "CROSS_COSINE",
    }
    save_file(vectors, str(file))
    run(model, "--file", file, *prompts, "--out", tmp_path / "out").is_clear_error(2, "says no plan")


def test_bad_input_is_one_line(run: Callable[..., Ran], model: Path, tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain", "bert")
    twice = tmp_path / "twice.txt"
    twice.write_text("one prompt\nand another\none prompt\n")
    url = ("--url", "http://127.0.0.1:9")
    out = ("--out", tmp_path / "out")
    run(model, *out).is_clear_error(2, "one of --url")
    run(plain, *url, *out).is_clear_error(2, "--pooling", "said by no file")
    run(plain, *url, *out, "--pooling", "mean").is_clear_error(2, "--normalize")
    run(model, *url, *out, "--pooling", "cls").is_clear_error(2, "files say last")
    run(model, *url, *out).is_clear_error(2, "does not answer")
    run(model, "--url", "ftp://x", *out).is_clear_error(2, "no http(s) address")
    run(model, *url, *out, "--prompts", twice).is_clear_error(2, "given twice")
    run(tmp_path / "none", *url, *out).is_clear_error(2, "no such model folder")
    run(model, "--file", tmp_path / "none.safetensors", *out).is_clear_error(2, "cannot be read")
    (plain / "tokenizer.json").unlink()
    run(plain, *url, *out, "--pooling", "mean", "--normalize").is_clear_error(2, "no tokenizer")
    (plain / "model.safetensors").unlink()
    ids = tmp_path / "ids.json"
    ids.write_text("[[1, 2], [3], [999]]")
    more = ("--pooling", "mean", "--normalize", "--prompts", ids)
    run(plain, *url, *out, *more).is_clear_error(2, "999", "vocab_size")


def test_inspect_names_the_command(cli: Cli, tmp_path: Path) -> None:
    port = tmp_path / "modeling_bge.py"
    port.write_text("from torch import nn\nclass NeuronBgeEncoderModel(nn.Module): pass\n")
    assert "equiport embeddings" in " ".join(cli("inspect", port).out.split())
