"""The client of servers, against servers of a few lines: addresses, refusals, and where requests go."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import midstream as ms
from midstream.backends.fingerprints import Fingerprints, weights
from midstream.backends.vllm.checkpoints import merged_checkpoint
from midstream.backends.vllm.launching import launched
from midstream.backends.vllm.serve import negotiation
from midstream.backends.vllm.serve.loop import Loop
from midstream.backends.vllm.serve.options import ServeOptions
from midstream.backends.vllm.serve.pool import Pool, key_of
from midstream.backends.vllm.serve.transport import Server
from midstream.core.backend import BackendSpec
from midstream.core.errors import (
    CaptureError,
    EngineError,
    MidstreamError,
    ModelLoadError,
    PromptError,
    SpecError,
    TransportError,
    UnsupportedOperationError,
)


class Answers:
    """What a server says, and what it was asked."""

    def __init__(self) -> None:
        self.status, self.body, self.headers = 200, b"{}", {}
        self.health = 200
        self.asked: list[tuple[str, str, Any]] = []


@contextmanager
def listening() -> Iterator[tuple[str, Answers]]:
    answers = Answers()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            answers.asked.append((self.path, self.headers.get("authorization", ""), self.rfile.read(length)))
            status, body = (answers.health, b"") if self.path == "/health" else (answers.status, answers.body)
            self.send_response(status)
            for name, value in answers.headers.items():
                self.send_header(name, value)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", answers
    finally:
        server.shutdown()
        server.server_close()


def options(*urls: str, **more: Any) -> ServeOptions:
    return ServeOptions(base_url=urls, retry_backoff=0.0, **{"max_retries": 1, **more})


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_addresses_as_other_clients_write_them(url: str) -> None:
    assert ServeOptions(base_url=url).base_url == ("http://a:1",)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "a:1"}, "an address is http://host:port"),
        ({"base_url": []}, "is the address of a server"),
        ({"base_url": "http://me:pass@a"}, "an address holds no key: give api_key"),
        ({"base_url": "http://a", "max_concurrency": 0}, "E_BAD_PARAM at options.max_concurrency"),
        ({"base_url": "http://a", "retries": 1}, "E_UNKNOWN_FIELD at options.retries"),
        ({}, "E_BAD_PARAM at options.base_url: where is the server?"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        ms.load("m", backend="vllm-serve", **given)
    assert message in str(raised.value)
    assert "pass" not in str(raised.value).replace("api_key", "")


def test_what_a_server_decides_is_refused_here() -> None:
    for name in ("dtype", "device"):
        with pytest.raises(SpecError, match="is the server's own: leave it out"):
            ms.load("m", backend="vllm-serve", base_url="http://a", **{name: "float32"})
    with pytest.raises(ModelLoadError, match="is not what a server serves"):
        ms.load(object(), backend="vllm-serve", base_url="http://a")


def test_a_key_is_nowhere_to_be_seen() -> None:
    secret = "sk-very-secret"
    one = BackendSpec("vllm-serve", "m", {"base_url": "http://a", "api_key": secret})
    two = BackendSpec("vllm-serve", "m", {"base_url": "http://a", "api_key": "other"})
    assert one == two
    assert hash(one) == hash(two)
    assert secret not in repr(one) + repr(one.options) + str(
        vars(Server("http://a", options("http://a"), secret)).keys()
    )
    assert one.secrets["api_key"] == secret
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at options\.api_key"):
        BackendSpec("vllm-serve", "m", {"api_key": 3})


@pytest.mark.parametrize(
    ("status", "message", "kind", "said"),
    [
        (400, "E_LAYER_RANGE at layers[0]: no layer 9", SpecError, "E_LAYER_RANGE at layers[0]: no layer 9"),
        (400, "E_SITE at capture.sites: no q", UnsupportedOperationError, "E_SITE at capture.sites"),
        (400, "E_NEVER at x: y", PromptError, "the server refuses it: E_NEVER"),
        (400, "too long", PromptError, "the server refuses it: too long"),
        (401, "Unauthorized", EngineError, "refuses the key: give its api_key"),
        (404, "no model", EngineError, "knows nothing of that: no model"),
        (409, "another model is served here", EngineError, "another model is served here: load it again"),
        (422, "2 rows were selected", CaptureError, "2 rows were selected"),
        (501, "untapped", TransportError, "untapped"),
    ],
)  # fmt: skip
def test_refusals_are_said_once_and_in_our_words(
    status: int, message: str, kind: type[MidstreamError], said: str
) -> None:
    with listening() as (url, answers):
        answers.status, answers.body = status, json.dumps({"error": {"message": message}}).encode()

        async def ask() -> None:
            server = Server(url, options(url), "key")
            try:
                await server.json("POST", "/x", {})
            finally:
                await server.close()

        with pytest.raises(kind) as raised:
            asyncio.run(ask())
        assert said in str(raised.value)
        assert len(answers.asked) == 1
        assert answers.asked[0][1] == "Bearer key"
        assert "key" not in str(raised.value).replace("api_key", "").replace("the key", "")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again_and_then_said(status: int) -> None:
    with listening() as (url, answers):
        answers.status, answers.body = status, b"not now"

        async def ask() -> None:
            server = Server(url, options(url, max_retries=2), None)
            try:
                await server.json("GET", "/x")
            finally:
                await server.close()

        with pytest.raises(TransportError, match=f"said {status}: not now"):
            asyncio.run(ask())
        assert len(answers.asked) == 3


def test_requests_of_one_prefix_go_to_one_server_and_spread_when_that_is_busy() -> None:
    urls = [f"http://host{place}" for place in range(4)]

    async def places() -> None:
        servers = [Server(url, options(*urls), None) for url in urls]
        pool = Pool(servers, 8)
        keys = [key_of([place] * 300, None) for place in range(64)]
        chosen: dict[bytes, Server] = {}
        for key in keys:
            async with pool.one(key) as server:
                chosen[key] = server
        assert len(set(chosen.values())) == 4
        for key in keys:
            async with pool.one(key) as server:
                assert server is chosen[key]
        assert key_of([1] * 256 + [2], None) == key_of([1] * 256 + [3], None)
        assert key_of([1], "salt") != key_of([1], None)
        # eight at a time with one key: the home server is never more than two requests ahead
        most: list[int] = []

        async def held(key: bytes) -> None:
            async with pool.one(key):
                most.append(max(one.running for one in servers) - min(one.running for one in servers))
                await asyncio.sleep(0.01)

        await asyncio.gather(*(held(keys[0]) for _ in range(24)))
        assert max(most) <= 3
        assert all(not one.running for one in servers)
        await pool.close()

    asyncio.run(places())


def test_what_one_server_fails_at_another_does_and_it_is_asked_again_when_well() -> None:
    with listening() as (bad, sick), listening() as (good, well):
        now = [0.0]

        async def ask() -> None:
            servers = [Server(url, options(bad, good, max_retries=0), None) for url in (bad, good)]
            pool = Pool(servers, 8, lambda: now[0])
            sick.status = sick.health = 503
            for place in range(12):
                assert await pool.ask(bytes([place]), lambda one: one.json("GET", "/x")) == {}
            assert sum(path == "/x" for path, *_ in sick.asked) == 1, "then it is left alone"
            assert sum(path == "/x" for path, *_ in well.asked) == 12
            now[0] = 10.0
            for place in range(12):
                await pool.ask(bytes([place]), lambda one: one.json("GET", "/x"))
            assert sum(path == "/health" for path, *_ in sick.asked) == 1, "one request asks, for a while"
            now[0] = 20.0
            sick.status = sick.health = 200
            for place in range(12):
                await pool.ask(bytes([place]), lambda one: one.json("GET", "/x"))
            assert sum(path == "/x" for path, *_ in sick.asked) > 1
            # many at once, as it comes back
            sick.status = sick.health = 503
            for place in range(12):
                await pool.ask(bytes([place]), lambda one: one.json("GET", "/x"))
            now[0], sick.status, sick.health = 30.0, 200, 200
            await asyncio.gather(*(pool.ask(bytes([i]), lambda one: one.json("GET", "/x")) for i in range(40)))
            sick.status = sick.health = well.status = well.health = 500
            with pytest.raises(TransportError):
                await pool.ask(b"", lambda one: one.json("GET", "/x"))
            await pool.close()

        asyncio.run(ask())


def test_an_interrupted_loop_cancels_what_ran() -> None:
    loop, begun, ended = Loop(), threading.Event(), threading.Event()

    async def long() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = loop.begin(long)
    assert begun.wait(5)
    future.cancel()
    assert ended.wait(5)
    assert loop.run(asyncio.sleep, 0, 7) == 7
    loop.close()


# --- what models are


def test_weights_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str, **tensors: torch.Tensor) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        return str(folder)

    tensor = torch.arange(5000.0)
    one, same = made("one", a=tensor), made("same", a=tensor.clone())
    assert weights(one) == weights(same)
    changed = tensor.clone()
    changed[2500] += 1
    others = [made("value", a=changed), made("name", b=tensor), made("shape", a=tensor.view(2, 2500))]
    assert len({weights(folder) for folder in (one, *others)}) == 4
    monkeypatch.chdir(one)
    assert weights("") is None
    assert weights(None) is None
    assert weights(str(tmp_path / "none")) is None
    assert weights("org/model") is None


def test_what_differs_is_refused_or_warned_of(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    here = Fingerprints("c", "w", "t", "m")
    negotiation.compare(here, here, None)
    negotiation.compare(here, Fingerprints(), None)
    negotiation.compare(Fingerprints(), here, None)
    assert not recwarn.list
    for name in ("config", "weights"):
        other = Fingerprints(**{**here.__dict__, name: "x"})
        with pytest.raises(ModelLoadError, match=f"the server's {name} x is not the one here"):
            negotiation.compare(here, other, None)
    for name in ("tokenizer", "template"):
        with pytest.warns(UserWarning, match=f"the server's {name} is not the one that is used here"):
            negotiation.compare(here, Fingerprints(**{**here.__dict__, name: "x"}), None)
    with pytest.raises(ModelLoadError, match="no checkpoint"):
        negotiation.compare(here, here, str(tmp_path))


def test_an_adapter_is_named_by_what_it_is(tmp_path: Path) -> None:
    before = negotiation.adapter_fingerprint(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    after = negotiation.adapter_fingerprint(str(tmp_path))
    assert before != after == negotiation.adapter_fingerprint(str(tmp_path))


def test_a_checkpoint_takes_the_place_of_weights(tmp_path: Path) -> None:
    base, other, into = (tmp_path / name for name in ("base", "other", "into"))
    for folder, names in ((base, ("config.json", "model.safetensors")), (other, ("config.json", "w.safetensors"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(folder.name)
    for _ in range(2):
        merged_checkpoint(str(base), str(other), into)
        assert {file.name: file.read_text() for file in into.iterdir()} == {
            "config.json": "base",
            "w.safetensors": "other",
        }
    with pytest.raises(ModelLoadError, match="no checkpoint"):
        merged_checkpoint(str(base), str(tmp_path / "none"), into)


def test_without_vllm_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.backends.vllm.launching.find_spec", lambda _: None)
    with pytest.raises(ModelLoadError, match="vLLM is not installed here"):
        launched("m", [], {})


def test_the_line_that_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("midstream.backends.vllm.launching.find_spec", lambda _: True)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    given = ["--port", "9", "--additional-config", '{"mine": 1}', "--max-logprobs=5"]
    line = launched(str(tmp_path), given, {"held_bytes": 1 << 20})
    words = line.command
    assert words[3:5] == ["serve", str(tmp_path)]
    additional = json.loads(words[words.index("--additional-config") + 1])
    assert additional["mine"] == 1
    assert additional["midstream"]["held_bytes"] == 1 << 20
    assert "--max-logprobs" not in words
    assert "--no-async-scheduling" in words
    assert "--skip-tokenizer-init" in words, "the folder has no tokenizer"
    assert "midstream" in line.environment["VLLM_PLUGINS"].split(",")
    assert line.shown().startswith("VLLM_") or " VLLM_" in line.shown()
    assert f" vllm serve {tmp_path}" in line.shown()
    hidden = launched("m", ["--api-key", "sk-a", "sk-b", "--port", "1", "--api_key=sk-c"], {})
    assert "sk-" not in hidden.shown()
    assert hidden.command.count("sk-a") == 1
    assert "--port 1" in hidden.shown()
    taken = launched("m", ["--additional_config", '{"mine": 2}'], {})
    assert json.loads(taken.command[taken.command.index("--additional-config") + 1])["mine"] == 2
    with pytest.raises(SpecError, match="E_BAD_PARAM at --async-scheduling"):
        launched("m", ["--async-scheduling"], {})
    with pytest.raises(SpecError, match="E_BAD_PARAM at --additional-config: is no JSON"):
        launched("m", ["--additional-config={"], {})
