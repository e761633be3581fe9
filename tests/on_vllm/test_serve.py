"""What a server with our plugin says over plain HTTP, to clients that have none of our code."""

from __future__ import annotations

import json
import struct
import threading
import urllib.request
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

import midstream as ms
from midstream.core.artifacts import artifact_bytes
from midstream.core.errors import EngineError, ModelLoadError
from midstream.formats.spec_json import encode_spec
from midstream.formats.wire import encode_tensor
from on_vllm.kit import Checkpoint, relative
from on_vllm.serving import Server, Servers, ask, served

PROMPT = [5, 9, 13, 40, 41, 42]
NO_SUCH = f"sha256:{'0' * 64}"
#: What requests are in most tests: ids, and no end of their own.
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def server(source: Checkpoint, servers: Servers) -> Server:
    return servers.get(source.folder)


@pytest.fixture(scope="module")
def texts(bytes_llama: tuple[Path, ms.LanguageModel], servers: Servers) -> tuple[Server, ms.LanguageModel]:
    folder, lm = bytes_llama
    return servers.get(folder), lm


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    status, answer = ask(f"{server.url}/v1/completions", {**BODY, **fields})
    assert status == 200, answer
    return answer


def decoded(obj: dict[str, Any], server: Server | None = None) -> np.ndarray[Any, Any]:
    """A tensor of an answer, in ten lines of NumPy and zstd."""
    if "handle" in obj:
        assert server is not None
        _, frame = ask(f"{server.url}/v1/activations/{obj['handle']}")
    else:
        import base64

        frame = base64.b64decode(obj["data"])
    return np.frombuffer(zstandard.decompress(frame), obj["dtype"]).reshape(obj["shape"])


def true_rows(source: Checkpoint, answer: dict[str, Any], site: str, layer: int) -> torch.Tensor:
    (choice,) = answer["choices"]
    return source.oracle((*PROMPT, *choice["token_ids"][:-1]))[site, layer]


@pytest.mark.parametrize("transport", ["base64", "binary"])
@pytest.mark.parametrize("where", ["body", "vllm_xargs"])
def test_a_completion_carries_its_rows(source: Checkpoint, server: Server, transport: str, where: str) -> None:
    capture = {"sites": ["resid_post", "q"], "layers": [0, 2], "select": "prompt[1:], generated"}
    fields: dict[str, Any] = {"capture": capture, "activations_transport": transport}
    if where == "vllm_xargs":
        fields = {"vllm_xargs": {"capture": json.dumps(capture), "activations_transport": transport}}
    answer = complete(server, return_token_ids=True, **fields)
    found = answer["activations"]
    assert found["labels"]["position"] == list(range(1, 9))
    assert found["labels"]["token_id"] == [*PROMPT[1:], *answer["choices"][0]["token_ids"][:-1]]
    assert found["labels"]["phase"] == ["prompt"] * 5 + ["generation"] * 3
    assert found["receipt"] == {"selected": 8, "computed": 8, "reused": 0, "overflowed": 0}
    for site in ("resid_post", "q"):
        assert found[site]["layers"] == [0, 2]
        rows = decoded(found[site], server)
        for place, layer in enumerate((0, 2)):
            true = true_rows(source, answer, site, layer)[1:9]
            assert relative(torch.from_numpy(rows[place].copy()), true) < 1e-4


def test_ids_come_back_only_where_they_are_asked_for(server: Server) -> None:
    plain, asked = complete(server), complete(server, capture={"layers": [1]})
    assert set(asked) - set(plain) == {"activations", "midstream"}
    (choice,), (with_rows,) = plain["choices"], asked["choices"]
    for name in ("token_ids", "prompt_token_ids"):
        assert not with_rows.get(name)
    assert with_rows["finish_reason"] == choice["finish_reason"]
    assert asked["usage"] == plain["usage"]


def test_rows_of_a_handle_are_raw_where_that_is_asked_and_go_when_they_are_dropped(server: Server) -> None:
    answer = complete(server, capture={"layers": [1]}, activations_transport="binary")
    held = answer["activations"]["resid_post"]
    path = f"{server.url}/v1/activations/{held['handle']}"
    _, raw = ask(f"{path}?compression=none")
    assert len(raw) == held["nbytes"] == 9 * 128 * 4
    assert raw == decoded(held, server).tobytes()
    assert ask(f"{path}?compression=gzip")[0] == 400
    assert ask(path, method="DELETE") == (204, b"")
    assert ask(path)[0] == ask(path, method="DELETE")[0] == 404
    assert ask(f"{server.url}/v1/activations/unknown")[0] == 404


def test_steering_differs_from_plain_by_every_way_in(source: Checkpoint, server: Server) -> None:
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    spec = ms.add(vector, layers=[1], strength=30.0, rows="sequence[1:]")
    (due,) = source.hf.generate([PROMPT], max_tokens=4, ignore_eos=True, steering=spec)
    data = artifact_bytes(np.asarray(vector, dtype=np.float32))
    name = f"sha256:{sha256(data).hexdigest()}"
    assert ask(f"{server.url}/v1/midstream/artifacts/{name}", data, "PUT")[0] == 201
    inline, by_id = encode_spec(spec), spec.canonical()
    lens = [{"activations": encode_tensor(vector[None]), "layer_indices": [1], "scale": 30.0}]
    for fields in (
        {"steering": inline},
        {"steering": by_id},
        {"vllm_xargs": {"steering": json.dumps(by_id)}},
    ):
        answer = complete(server, return_token_ids=True, **fields)
        assert tuple(answer["choices"][0]["token_ids"]) == due.token_ids
        (line,) = answer["midstream"]["steering"]
        assert (line["layer"], line["selected"]) == (1, len(PROMPT) + 2)
    every = complete(server, return_token_ids=True, vllm_xargs={"apply_steering_vectors": json.dumps(lens)})
    (due,) = source.hf.generate(
        [PROMPT], max_tokens=4, ignore_eos=True, steering=ms.add(vector, layers=[1], strength=30.0)
    )
    assert tuple(every["choices"][0]["token_ids"]) == due.token_ids
    plain = complete(server, return_token_ids=True, steering=False)
    assert "midstream" not in plain


def events_of(server: Server, path: str, body: Any) -> list[Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_carries_its_rows_in_its_last_event(texts: tuple[Server, ms.LanguageModel]) -> None:
    server, lm = texts
    for path, fields in (
        ("/v1/completions", {"prompt": "hello there"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        prompt = fields.get("prompt") or fields["messages"]
        body = {**fields, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True,
                "capture": {"layers": [1]}}  # fmt: skip
        *pieces, last = events_of(server, path, body)
        due = lm.capture([prompt], layers=[1], max_tokens=5, ignore_eos=True)
        assert last["choices"] == []
        for name in ("id", "object", "created", "model"):
            assert last[name] == pieces[0][name]
        assert last["activations"]["labels"]["token_id"] == due.labels.token_id.tolist()
        rows = torch.from_numpy(decoded(last["activations"]["resid_post"])[0].copy())
        assert relative(rows, due.rows(1)) < 1e-4
        said = [one["choices"][0] for one in pieces if one["choices"]]
        texts_ = [(one.get("text") or one.get("delta", {}).get("content") or "") for one in said]
        assert "".join(texts_) == due.outputs[0].text
        assert not any(one.get("token_ids") or one.get("prompt_token_ids") for one in said)


def test_chat_carries_rows_of_the_template_too(texts: tuple[Server, ms.LanguageModel]) -> None:
    server, lm = texts
    chat = [{"role": "user", "content": "hello"}]
    body = {"messages": chat, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "capture": {"layers": [2]}}
    status, answer = ask(f"{server.url}/v1/chat/completions", body)
    assert status == 200
    due = lm.capture([chat], layers=[2], max_tokens=3, ignore_eos=True)
    assert answer["activations"]["labels"]["token_id"] == due.labels.token_id.tolist()
    rows = torch.from_numpy(decoded(answer["activations"]["resid_post"])[0].copy())
    assert relative(rows, due.rows(2)) < 1e-4


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"capture": {"layers": []}}, "E_LAYER_RANGE at capture.layers", "capture.layers"),
        ({"capture": {"layers": [3]}}, "E_LAYER_RANGE at capture.layers[0]: no layer 3", "capture.layers[0]"),
        ({"capture": {"sites": ["router_logits"]}}, "E_SITE at", None),
        ({"capture": {"rows": "prompt"}}, "E_UNKNOWN_FIELD at capture.rows", "capture.rows"),
        ({"capture": {"select": "prompt[a]"}}, "E_SELECTION at capture.select", "capture.select"),
        ({"capture": {}, "n": 2}, "Set n to 1: activations and steering vectors are for one choice only.", "n"),
        ({"capture": {}, "prompt": [[5], [6]]}, "2 prompts: send them one by one", "prompt"),
        ({"capture": {}, "output_residual_stream": True}, "give one of them", "capture"),
        ({"capture": {}, "echo": True}, "give return_token_ids too", "echo"),
        ({"output_residual_stream": "0"}, "is a list of layers, or true for all", "output_residual_stream"),
        ({"output_residual_stream": [True]}, "is a list of layers, or true for all", "output_residual_stream"),
        ({"output_residual_stream": [1.0]}, "is a list of layers, or true for all", "output_residual_stream"),
        ({"vllm_xargs": {"apply_hooks": "[{}]"}}, "code of a caller is never run: use steering", None),
        ({"vllm_xargs": {"capture": "{"}}, "E_BAD_PARAM at vllm_xargs.capture: is no JSON", "vllm_xargs.capture"),
        ({"vllm_xargs": {"midstream": '{"id": "a"}'}}, "E_UNKNOWN_FIELD at vllm_xargs.midstream.id", None),
        ({"capture": {}, "vllm_xargs": {"midstream": '{"prompt_len": 7}'}}, "is 7, of a prompt of 6 tokens", None),
        ({"vllm_xargs": {"midstream": '{"model_fingerprint": "x"}'}}, "another model is served here", None),
        ({"capture": {}, "activations_transport": "pigeon"}, "no transport 'pigeon'", "activations_transport"),
        ({"steering": {"ops": [{"kind": "add", "layers": [1], "vector": NO_SUCH}]}}, "E_ARTIFACT_MISSING", None),
        ({"steering": {"ops": [{"kind": "add", "layers": [9], "vector": [0.0] * 128}]}}, "E_LAYER_RANGE at", None),
        ({"steering": {"ops": [{"kind": "add", "layers": [1], "vector": [0.0] * 4}]}}, "E_BAD_PARAM at", None),
        ({"steering": "add"}, "is an object with ops", "steering"),
        ({"capture": {}, "prompt": PROMPT * 60}, "maximum context length", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_refused_in_words(
    server: Server, fields: dict[str, Any], message: str, param: str | None, stream: bool
) -> None:
    status, answer = ask(f"{server.url}/v1/completions", {**BODY, **fields, "stream": stream})
    if status == 200:  # a stream has begun when its tokens are counted
        assert stream
        answer = json.loads(answer.decode().splitlines()[0].removeprefix("data: "))
    else:
        assert status in (400, 404, 409)
    assert message in answer["error"]["message"]
    if param is not None:
        assert answer["error"]["param"] == param


def test_a_capture_that_is_too_large_is_refused_before_it_runs(small_server: Server) -> None:
    server = small_server
    status, answer = ask(
        f"{server.url}/v1/completions",
        {**BODY, "capture": {"sites": ["resid_post", "q", "resid_pre"]}, "max_tokens": 200},
    )
    assert status == 400
    assert "this server holds 65,536 bytes" in answer["error"]["message"]
    # what waits has its place until it is fetched or too old, and who comes after waits for it
    body = {
        **BODY,
        "capture": {"layers": [1], "select": "prompt"},
        "prompt": PROMPT * 12,
        "activations_transport": "binary",
    }
    found: list[Any] = []

    def one() -> None:
        found.append(ask(f"{server.url}/v1/completions", body))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in found] == [200] * 4
    gone = [ask(f"{server.url}/v1/activations/{a['activations']['resid_post']['handle']}")[0] for _, a in found]
    assert gone.count(404) >= 2


def test_artifacts_are_hashed_again_and_bounded(small_server: Server) -> None:
    root = f"{small_server.url}/v1/midstream/artifacts"
    for one in ask(root)[1]["data"]:
        ask(f"{root}/{one['id']}", method="DELETE")
    data = artifact_bytes(np.ones(128, dtype=np.float32))
    name = f"sha256:{sha256(data).hexdigest()}"
    other = f"sha256:{'0' * 64}"
    assert ask(f"{root}/{other}", data, "PUT")[1]["error"]["message"].startswith("E_ARTIFACT_HASH at artifact:")
    assert ask(f"{root}/..%2Fetc", data, "PUT")[0] in (400, 404)
    assert ask(f"{root}/{name}", method="HEAD")[0] == 404
    assert ask(f"{root}/{name}", data, "PUT") == (201, {"id": name})
    assert ask(f"{root}/{name}", method="HEAD")[0] == 200
    assert ask(f"{root}/{name}")[1] == data
    large = artifact_bytes(np.ones(1 << 15, dtype=np.float32))
    status, answer = ask(f"{root}/sha256:{sha256(large).hexdigest()}", large, "PUT")
    assert (status, answer["error"]["message"][:16]) == (413, "E_SPEC_TOO_LARGE")
    bad = struct.pack("<Q", 2) + b"{}"
    assert ask(f"{root}/sha256:{sha256(bad).hexdigest()}", bad, "PUT")[0] == 400
    listed = ask(root)[1]
    assert [one["id"] for one in listed["data"]] == [name]
    assert listed["used_bytes"] == len(data)
    assert ask(f"{root}/{name}", method="DELETE")[0] == 204
    assert ask(f"{root}/{name}")[0] == ask(f"{root}/{name}", method="DELETE")[0] == 404
    assert ask(root)[1]["data"] == []


def test_other_routes_do_not_steer_in_silence(server: Server) -> None:
    for xargs in ({"midstream": '{"id":"a"}'}, {"steering": "{}"}, {"apply_steering_vectors": "[]"}):
        body = {**BODY, "vllm_xargs": xargs}
        status, answer = ask(f"{server.url}/invocations", body)
        assert status == 400, answer
        assert "is read by /v1/completions and /v1/chat/completions: send it there" in answer["error"]["message"]
    status, answer = ask(f"{server.url}/invocations", BODY)
    assert status == 200, answer


def test_what_it_says_of_itself(source: Checkpoint, server: Server) -> None:
    status, said = ask(f"{server.url}/v1/midstream/capabilities")
    assert status == 200
    assert said["model"]["facts"]["num_layers"] == 3
    assert said["versions"]["wire"] == 1
    assert said["capture"]["layouts"]["resid_post"]["2"] == [128, None, None]
    assert said["engine"]["has_tokenizer"] is False
    assert str(source.folder) not in json.dumps(said["limits"])


@pytest.fixture(scope="module")
def bare(source: Checkpoint, servers: Servers) -> Server:
    """A `vllm serve` in whose environment we are installed, and that was not asked for taps; with a key."""
    return servers.bare(source.folder, "--api-key", "secret")


def test_a_server_without_taps_says_so(bare: Server) -> None:
    status, answer = ask(f"{bare.url}/v1/completions", {**BODY, "capture": {}}, authorization="Bearer secret")
    assert status == 400
    assert "this engine was not asked for taps" in answer["error"]["message"]
    assert ask(f"{bare.url}/v1/completions", BODY, authorization="Bearer secret")[0] == 200
    with pytest.raises(ModelLoadError, match="midstream vllm-serve"), served(bare, api_key="secret"):
        pass


def test_a_wrong_key_is_a_wrong_key(bare: Server) -> None:
    assert ask(f"{bare.url}/v1/midstream/capabilities")[0] == 401
    assert ask(f"{bare.url}/v1/activations/x")[0] == 401
    for key in (None, "other"):
        with pytest.raises((ModelLoadError, EngineError), match="refuses the key"), served(bare, api_key=key):
            pass
