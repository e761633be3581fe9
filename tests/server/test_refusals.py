"""What is refused, in which words and with which status; before anything runs, and never with what is inside."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import midstream as ms
from midstream.formats.spec_json import encode_spec
from server.kit import Serve

PROMPT = {"prompt": "hello", "max_tokens": 2}
STEER: Any = encode_spec(ms.add(torch.ones(32), layers=[1], strength=1.0))


def refused(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object of a refusal, whose form is that of every one."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "request_id"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert re.fullmatch("req_[0-9a-f]{32}", body["request_id"])
    assert answer.headers["x-request-id"] == body["request_id"]
    assert "Traceback" not in answer.text
    return body["error"]


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no layers": ({"output_residual_stream": []}, "output_residual_stream", "list of layers"),
    "a negative layer": ({"output_residual_stream": [-1]}, "output_residual_stream", "no layer -1"),
    "no such layer": ({"output_residual_stream": [4]}, "output_residual_stream", "it has no Layer 4."),
    "a text of a layer": ({"output_residual_stream": "0"}, "output_residual_stream", "list of layers"),
    "a truth as layer": ({"output_residual_stream": [True]}, "output_residual_stream", "list of layers"),
    "a float as layer": ({"output_residual_stream": [1.5]}, "output_residual_stream", "list of layers"),
    "a number": ({"output_residual_stream": 1}, "output_residual_stream", "list of layers"),
    "two choices captured": ({"n": 2, "output_residual_stream": [1]}, "n", "Set n to 1: activations"),
    "two choices steered": ({"n": 2, "steering": STEER}, "n", "Set n to 1: activations"),
    "two prompts captured": ({"prompt": ["a", "b"], "capture": {}}, "prompt", "Set n to 1: activations"),
    "too many prompts": ({"prompt": ["a"] * 300}, "prompt", "at most 256"),
    "too many choices": ({"prompt": ["a"] * 3, "n": 100}, "prompt", "at most 256"),
    "an unknown field": ({"capture": {"layer": [1]}}, "capture.layer", "unknown field"),
    "an unknown site": ({"capture": {"sites": ["residual"]}}, "capture.sites[0]", "no site"),
    "a site that the model has not": ({"capture": {"sites": ["router_logits"]}}, "sites", "router_logits"),
    "a layer of a capture": ({"capture": {"layers": [9]}}, "capture.layers[0]", "no layer 9"),
    "rows in no grammar": ({"capture": {"select": "prompt[x]"}}, "capture.select", "cannot read"),
    "an empty clause": ({"capture": {"select": {"prompt_positions": []}}}, "capture.select.prompt_positions", "empty"),
    "a storage type": ({"capture": {"dtype": "int4"}}, "capture.dtype", "no storage dtype"),
    "an op of no kind": ({"steering": {"ops": [{"kind": "melt", "layers": [1]}]}}, "steering.ops[0]", "melt"),
    "an op's field": (
        {"steering": {"ops": [{"kind": "add", "layers": [1], "vector": [1.0] * 32, "speed": 1}]}},
        "steering.ops[0]", "speed",
    ),
    "a wrong width": (
        {"steering": {"ops": [{"kind": "add", "layers": [1], "vector": [1.0, 2.0]}]}}, "steering.ops[0]", "32",
    ),
    "a vector that is not finite": (
        {"steering": {"ops": [{"kind": "add", "layers": [1], "vector": [1e400] * 32}]}}, "steering.ops[0]", "finite",
    ),
    "a layer of an op": (
        {"steering": {"ops": [{"kind": "add", "layers": [7], "vector": [1.0] * 32}]}}, "steering.ops[0]", "no layer 7",
    ),
    "an artifact that is not there": (
        {"steering": {"ops": [{"kind": "add", "layers": [1], "vector": "sha256:" + "0" * 64}]}}, "steering", "artifact",
    ),
    "code": ({"vllm_xargs": {"apply_hooks": "[]"}}, "vllm_xargs.apply_hooks", "use steering"),
    "queries in another form": ({"output_qk": True}, "output_qk", 'use capture with "sites": ["q", "k"]'),
    "two captures": ({"capture": {}, "output_residual_stream": [1]}, "capture", "give one of them"),
    "no transport": ({"capture": {}, "activations_transport": "pigeon"}, "activations_transport", "base64, binary"),
    "too many tokens": ({"max_tokens": 1000}, "max_tokens", "are left"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "greater"),
    "a float of tokens": ({"max_tokens": 1.5}, "max_tokens", "integer"),
    "an id that is none": ({"prompt": [1, 99999]}, "prompt", "99999"),
    "a negative id": ({"prompt": [-1]}, "prompt", "-1"),
    "no prompt": ({"prompt": "", "add_special_tokens": False}, "prompt", "token"),
    "an empty list of prompts": ({"prompt": []}, "prompt", "list of them"),
    "a mixed list": ({"prompt": [1, "a"]}, "prompt", "text or token ids"),
    "half a surrogate pair": ({"prompt": "\ud800"}, "prompt", "surrogate"),
    "a field of nothing": ({"colour": 1}, "colour", "unknown field"),
    "a field without effect": ({"presence_penalty": 1.0}, "presence_penalty", "not applied"),
    "a temperature": ({"temperature": -1}, "temperature", "greater"),
    "a top_p": ({"top_p": 0}, "top_p", "greater"),
    "two constraints": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "give one"),
    "a regex": ({"structured_outputs": {"regex": "("}}, "constraint", ""),
    "xargs that are no JSON": ({"vllm_xargs": {"capture": "{"}}, "vllm_xargs.capture", "no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_requests(client: httpx2.Client, name: str) -> None:
    given, param, words = BAD[name]
    content = json.dumps({**PROMPT, **given}).replace("Infinity", "1e400")
    answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = refused(answer, 404 if "artifact that" in name else 400)
    assert words in error["message"], error
    assert (error["param"] or "").startswith(param) or param in (error["param"] or ""), error
    if answer.status_code == 400:
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")


def test_messages_are_refused_by_name(client: httpx2.Client) -> None:
    for body, words in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "content"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
    ):
        error = refused(client.post("/v1/chat/completions", json=body), 400)
        assert words in (error["param"] or ""), error


def test_other_kinds_of_refusal(client: httpx2.Client) -> None:
    refused(client.post("/v1/completions", json={**PROMPT, "model": "gpt-5"}), 404)
    refused(client.get("/v1/models/none/such"), 404)
    refused(client.get("/v1/nothing"), 404)
    refused(client.get("/v1/completions"), 405)
    refused(client.get("/v1/jobs/../../etc/passwd"), 404)
    refused(client.get("/v1/files/..%2F..%2Fetc%2Fpasswd"), 404)
    refused(client.get("/v1/files/file-00000000"), 404)
    refused(client.get("/v1/activations/nobody"), 404)
    refused(client.put("/v1/artifacts/..%2Fetc", content=b"x"), 404)
    refused(client.put("/v1/artifacts/passwd", content=b"x"), 400)
    refused(client.put(f"/v1/artifacts/sha256:{'0' * 64}", content=b"x"), 400)
    refused(client.post("/v1/hooks/register", json={}), 400)
    refused(client.post("/v1/jobs", json={"body": {**PROMPT, "stream": True}}), 400)
    refused(client.post("/v1/jobs", json={"body": {**PROMPT, "output_residual_stream": [9]}}), 400)
    refused(client.post("/v1/batches", json={"input_file_id": "file-0000", "endpoint": "/v1/completions"}), 400)
    refused(client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "other"}), 400)


def test_bodies_that_are_none(client: httpx2.Client) -> None:
    def post(content: bytes, kind: str = "application/json") -> httpx2.Response:
        return client.post("/v1/completions", content=content, headers={"content-type": kind})

    for content in (b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}', b"{'a': 1}"):
        refused(post(content), 400)
    refused(post(b"{}", "text/plain"), 415)
    refused(post(b'{"prompt": "' + b"a" * (70 << 20) + b'"}'), 413)
    names = "".join(map(chr, [*range(0x20, 0x7F), 0xE9, 0x4E2D, 0x1F600, 0x202E]))
    for field in ("prompt", "user", "stop"):
        answer = client.post("/v1/completions", json={**PROMPT, field: names})
        assert answer.status_code in (200, 400), answer.text


@pytest.fixture(scope="module")
def tight(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """A server that takes little, and waits for little."""
    given = ["--limit", "body_seconds=1", "--limit", "capture_cap=100"]
    server = Serve(tmp_path_factory.mktemp("tight"), ["--model", str(tiny), *given])
    try:
        yield server.start()
    finally:
        server.close()


def test_a_slow_body_is_given_up(tight: Serve) -> None:
    with socket.create_connection(("127.0.0.1", tight.port)) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        slow.settimeout(20)
        said = slow.recv(4096)
    assert b" 408 " in said.splitlines()[0]


def test_a_capture_over_the_cap_says_what_would_fit(tight: Serve) -> None:
    given = {"prompt": "hello", "max_tokens": 4, "output_residual_stream": [1, 2]}
    with tight.client() as client:
        error = refused(client.post("/v1/completions", json=given), 400)
        assert client.post("/v1/completions", json={**given, "output_residual_stream": False}).status_code == 200
    assert "640 numbers" in error["message"]
    assert "1 tokens fit" in error["message"]


def test_whoever_leaves_is_not_waited_for(server: Serve) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}).encode()
    before = metric(server, "midstream_sequences_running")

    def leave() -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as one:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"  # noqa: E501
            one.sendall(head.encode() + body)
            time.sleep(0.1)

    threads = [threading.Thread(target=leave) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    until = time.monotonic() + 20
    while metric(server, "midstream_requests_here") or metric(server, "midstream_sequences_running") > before:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert metric(server, "midstream_open_holds") == 0


def metric(server: Serve, name: str) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_log_has_no_prompt_and_no_key(server: Serve) -> None:
    with server.client("ms-a-secret-that-nobody-should-see") as client:
        client.post("/v1/completions", json={"prompt": "a prompt that nobody should see", "max_tokens": 2})
        client.post("/v1/completions", json={"prompt": "a prompt that nobody should see", "max_tokens": "x"})
    text = server.log.read_text()
    assert "nobody should see" not in text
    assert "that-nobody" not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert any(line.get("route") == "/v1/completions" and line["request_id"].startswith("req_") for line in lines)
