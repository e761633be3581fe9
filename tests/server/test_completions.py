"""Completions over real HTTP: the texts, rows and figures that `lm` gives for the same request."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

import midstream as ms
from midstream.formats.spec_json import encode_spec
from midstream.formats.wire import decode_tensor, encode_tensor
from server.kit import Serve

PROMPT = "What is steering?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


def post(client: httpx2.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx2.Client, path: str = "/v1/completions", **body: Any) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def close(got: Tensor, want: Tensor) -> bool:
    """Whether each row is within the tolerance of docs/semantics.md in float32."""
    error = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1).clamp(min=1e-12)
    return got.shape == want.shape and float(error.max()) < 1e-4


def test_a_completion_is_what_the_model_says(client: httpx2.Client, lm: ms.LanguageModel, tiny: Any) -> None:
    found = post(client, prompt=PROMPT, model="tiny", return_token_ids=True, **GREEDY)
    want = lm.generate([PROMPT], max_tokens=6)[0]
    (choice,) = found["choices"]
    assert found["object"] == "text_completion"
    assert found["model"] == str(tiny)
    assert choice["text"] == want.text
    assert choice["token_ids"] == list(want.token_ids)
    assert choice["prompt_token_ids"] == list(want.prompt_token_ids)
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] is None
    assert found["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
    assert found["usage"]["completion_tokens"] == len(want.token_ids)
    assert "activations" not in found
    assert "midstream" not in found


def test_ids_are_taken_as_they_are_and_texts_get_their_bos_once(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    ids = [9, 8, 7]
    assert post(client, prompt=ids, return_token_ids=True, **GREEDY)["choices"][0]["prompt_token_ids"] == ids
    with_bos = post(client, prompt="<s>hi", return_token_ids=True, **GREEDY)["choices"][0]["prompt_token_ids"]
    assert with_bos.count(0) == 1
    bare = post(client, prompt="hi", add_special_tokens=False, return_token_ids=True, **GREEDY)
    assert 0 not in bare["choices"][0]["prompt_token_ids"]


def test_a_chat(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = post(client, "/v1/chat/completions", messages=messages, **GREEDY)
    want = lm.generate([messages], max_tokens=6)[0]
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert found["usage"]["prompt_tokens"] == len(want.prompt_token_ids)


@pytest.mark.parametrize("asked", [[2, 0, 2], True])
def test_the_residual_stream(client: httpx2.Client, lm: ms.LanguageModel, asked: Any) -> None:
    found = post(client, prompt=PROMPT, output_residual_stream=asked, **GREEDY)
    layers = [0, 1, 2, 3] if asked is True else [0, 2]
    cap = lm.capture([PROMPT], layers=layers, max_tokens=6)
    rows = decode_tensor(found["activations"]["residual_stream"])
    assert list(rows.shape) == [len(layers), len(cap.outputs[0].prompt_token_ids) + 5, 32]
    assert close(rows, torch.stack([cap.rows(layer) for layer in layers]))
    assert list(found)[-1] == "activations"


def test_a_decoder_of_ten_lines(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    one = post(client, prompt=PROMPT, output_residual_stream=[1], **GREEDY)["activations"]["residual_stream"]
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(one["data"]))
    rows = np.frombuffer(raw, one["dtype"]).reshape(one["shape"])
    cap = lm.capture([PROMPT], layers=[1], max_tokens=6)
    assert np.allclose(rows[0], cap.rows(1).numpy(), rtol=1e-4, atol=1e-5)


def test_captures_of_every_site_with_labels(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    sites = list(lm.capabilities.capture.sites)
    capture = {"sites": sites, "layers": [1, 3], "select": "prompt[-2:], generated"}
    found = post(client, prompt=PROMPT, capture=capture, **GREEDY)["activations"]
    cap = lm.capture([PROMPT], sites=sites, layers=[1, 3], rows="prompt[-2:], generated", max_tokens=6)
    assert found["labels"]["position"] == cap.labels.position.tolist()
    assert found["labels"]["token_id"] == cap.labels.token_id.tolist()
    assert found["labels"]["phase"] == cap.labels.phase.tolist()
    for site in sites:
        assert found[site]["layers"] == [1, 3]
        rows = decode_tensor({name: of for name, of in found[site].items() if name != "layers"})
        assert close(rows, torch.stack([cap.rows(layer, site) for layer in (1, 3)])), site
    assert found["receipt"]["selected"] == found["receipt"]["computed"] == 7


def test_a_binary_answer(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    given = {"prompt": PROMPT, "output_residual_stream": [1], "activations_transport": "binary"}
    held = post(client, **given, **GREEDY)["activations"]["residual_stream"]
    assert "data" not in held
    frame = client.get(f"/v1/activations/{held['handle']}")
    plain = client.get(f"/v1/activations/{held['handle']}", params={"compression": "none"})
    assert zstandard.ZstdDecompressor().decompress(frame.content) == plain.content
    assert len(plain.content) == held["nbytes"]
    rows = torch.frombuffer(bytearray(plain.content), dtype=torch.float32).reshape(held["shape"])
    assert close(rows[0], lm.capture([PROMPT], layers=[1], max_tokens=6).rows(1))
    assert client.delete(f"/v1/activations/{held['handle']}").status_code == 204
    assert client.get(f"/v1/activations/{held['handle']}").status_code == 404


def steers() -> dict[str, Any]:
    vector = torch.randn(32, generator=torch.Generator().manual_seed(1))
    return {
        "add": ms.add(vector, layers=[1], strength=3.0),
        "ablate": ms.ablate(vector, layers=[2], strength=1.0),
        "of some rows": ms.add(vector, layers=[1], strength=5.0, rows="prompt[-1]"),
    }


@pytest.mark.parametrize("name", list(steers()))
def test_steering(client: httpx2.Client, lm: ms.LanguageModel, name: str) -> None:
    spec = steers()[name]
    found = post(client, prompt=PROMPT, steering=encode_spec(spec), output_residual_stream=[3], **GREEDY)
    cap = lm.capture([PROMPT], layers=[3], max_tokens=6, steering=spec)
    assert found["choices"][0]["text"] == cap.outputs[0].text
    assert close(decode_tensor(found["activations"]["residual_stream"])[0], cap.rows(3))
    receipts = [(one["op"], one["layer"], one["selected"], one["computed"]) for one in found["midstream"]["steering"]]
    assert receipts == [(one.op, one.layer, one.selected, one.computed) for one in cap.outputs[0].steering]
    plain = post(client, prompt=PROMPT, output_residual_stream=[3], **GREEDY)
    assert not close(decode_tensor(plain["activations"]["residual_stream"])[0], cap.rows(3))


def test_vllm_lens_fields(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    vector = torch.randn(1, 32, generator=torch.Generator().manual_seed(2))
    steer = [{"activations": encode_tensor(vector), "layer_indices": [1], "scale": 2.0}]
    xargs = {"output_residual_stream": "[2]", "apply_steering_vectors": json.dumps(steer)}
    found = post(client, prompt=PROMPT, vllm_xargs=xargs, **GREEDY)
    cap = lm.capture([PROMPT], layers=[2], max_tokens=6, steering=ms.add(vector[0], layers=[1], strength=2.0))
    assert close(decode_tensor(found["activations"]["residual_stream"])[0], cap.rows(2))


def test_log_probabilities(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    found = post(client, prompt=PROMPT, logprobs=3, prompt_logprobs=2, **GREEDY)["choices"][0]
    want = lm.generate([PROMPT], max_tokens=6, logprobs=3, prompt_logprobs=2)[0]
    assert want.logprobs is not None
    assert want.prompt_logprobs is not None
    assert found["logprobs"]["token_logprobs"] == pytest.approx([one.logprob for one in want.logprobs], abs=1e-4)
    assert found["logprobs"]["text_offset"][0] == 0
    assert found["prompt_logprobs"][0] is None
    for got, due in zip(found["prompt_logprobs"][1:], want.prompt_logprobs[1:], strict=True):
        assert due is not None
        assert got[str(due.token_id)]["logprob"] == pytest.approx(due.logprob, abs=1e-4)
    messages = [{"role": "user", "content": "hello"}]
    chat = post(client, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2, **GREEDY)
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 6
    assert all(len(one["top_logprobs"]) == 2 for one in content)


def test_echo(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    found = post(client, prompt=PROMPT, echo=True, logprobs=0, **GREEDY)["choices"][0]
    want = lm.generate([PROMPT], max_tokens=6, logprobs=0, prompt_logprobs=0)[0]
    assert found["text"] == PROMPT + (want.text or "")
    assert len(found["logprobs"]["tokens"]) == len(want.prompt_token_ids) + 6
    assert found["logprobs"]["token_logprobs"][0] is None


def test_several_prompts_and_choices(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    found = post(client, prompt=["one", "two"], n=2, seed=7, temperature=1, max_tokens=5, return_token_ids=True)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
    again = post(client, prompt=["one", "two"], n=2, seed=7, temperature=1, max_tokens=5, return_token_ids=True)
    assert [one["token_ids"] for one in found["choices"]] == [one["token_ids"] for one in again["choices"]]
    assert found["choices"][0]["token_ids"] != found["choices"][1]["token_ids"]
    prompts = sum(len(found["choices"][place]["prompt_token_ids"]) for place in (0, 2))
    assert found["usage"]["prompt_tokens"] == prompts


def test_stop_strings_and_ids(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    whole = lm.generate([PROMPT], max_tokens=12)[0]
    assert whole.text is not None
    stop = whole.text[4:6]
    want = lm.generate([PROMPT], max_tokens=12, stop=[stop])[0]
    found = post(client, prompt=PROMPT, stop=stop, temperature=0, max_tokens=12)["choices"][0]
    assert (found["text"], found["finish_reason"], found["stop_reason"]) == (want.text, "stop", stop)
    streamed = events(client, prompt=PROMPT, stop=stop, temperature=0, max_tokens=12)
    assert "".join(one["choices"][0]["text"] for one in streamed) == want.text
    at = whole.token_ids[3]
    found = post(client, prompt=PROMPT, stop_token_ids=[at], temperature=0, max_tokens=12)["choices"][0]
    assert found["stop_reason"] == at


def test_a_stream(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    given = {"output_residual_stream": [1], "stream_options": {"include_usage": True}, "return_token_ids": True}
    found = events(client, prompt=PROMPT, **given, **GREEDY)
    cap = lm.capture([PROMPT], layers=[1], max_tokens=6)
    *chunks, usage, last = found
    heads = {tuple(one[name] for name in ("id", "object", "created", "model")) for one in found}
    assert len(heads) == 1
    assert "".join(one["choices"][0]["text"] for one in chunks) == cap.outputs[0].text
    ids = [token for one in chunks for token in one["choices"][0]["token_ids"]]
    assert ids == list(cap.outputs[0].token_ids)
    assert [one["choices"][0]["finish_reason"] for one in chunks][-1] == "length"
    assert usage["choices"] == [] == last["choices"]
    assert usage["usage"]["completion_tokens"] == 6
    assert close(decode_tensor(last["activations"]["residual_stream"])[0], cap.rows(1))


def test_a_stream_of_a_chat(client: httpx2.Client, lm: ms.LanguageModel) -> None:
    messages = [{"role": "user", "content": "hello"}]
    found = events(client, "/v1/chat/completions", messages=messages, **GREEDY)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in found)
    assert text == lm.generate([messages], max_tokens=6)[0].text


def test_a_stream_that_fails_midway_says_so_last_under_its_own_id(client: httpx2.Client) -> None:
    spec = ms.add(torch.full((32,), 1e30), layers=[3], strength=1e9, rows="generated")  # more than a float holds
    body = {"prompt": PROMPT, "steering": encode_spec(spec), "temperature": 1, "max_tokens": 6, "stream": True}
    body["return_token_ids"] = True  # so that each token is an event
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        request_id = answer.headers["x-request-id"]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    first, *_, last = map(json.loads, lines)
    assert first["choices"]
    assert last["request_id"] == request_id
    assert last["error"]["code"] == "upstream_server_error"
    assert "not finite" in last["error"]["message"]


def test_constraints_in_both_forms(client: httpx2.Client) -> None:
    one = post(client, prompt=PROMPT, structured_outputs={"choice": ["yes", "no"]}, max_tokens=8, temperature=0)
    assert one["choices"][0]["text"] in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = post(client, prompt=PROMPT, response_format=form, max_tokens=24, temperature=0)
    assert json.loads(found["choices"][0]["text"])["a"] in (1, 2)


def test_many_at_once_have_their_own_rows_and_steers(server: Serve, lm: ms.LanguageModel) -> None:
    specs = [None, *steers().values()]
    prompts = [f"request {place} " * (1 + place % 5) for place in range(24)]

    async def run() -> list[dict[str, Any]]:
        headers = {"authorization": "Bearer any"}
        async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:

            async def one(place: int) -> dict[str, Any]:
                spec = specs[place % len(specs)]
                body = {"prompt": prompts[place], "output_residual_stream": [place % 4], "temperature": 0,
                        "max_tokens": 3 + place % 6}  # fmt: skip
                answer = await client.post(
                    "/v1/completions", json=body | ({} if spec is None else {"steering": encode_spec(spec)})
                )
                assert answer.status_code == 200, answer.text
                return answer.json()

            return await asyncio.gather(*map(one, range(len(prompts))))

    for place, found in enumerate(asyncio.run(run())):
        cap = lm.capture(
            [prompts[place]],
            layers=[place % 4],
            max_tokens=3 + place % 6,
            steering=specs[place % len(specs)] or False,
        )
        assert found["choices"][0]["text"] == cap.outputs[0].text
        assert close(decode_tensor(found["activations"]["residual_stream"])[0], cap.rows(place % 4))


def test_our_own_client_reads_from_this_server_too(server: Serve, lm: ms.LanguageModel) -> None:
    with ms.load(None, backend="vllm-serve", base_url=server.url) as there:
        got = there.capture([PROMPT, "hello"], layers=[0, 2], max_tokens=5, rows="prompt[-1], generated")
        want = lm.capture([PROMPT, "hello"], layers=[0, 2], max_tokens=5, rows="prompt[-1], generated")
        assert got.labels == want.labels
        for layer in (0, 2):
            assert close(got.rows(layer), want.rows(layer))
        spec = steers()["add"]
        assert [one.text for one in there.generate([PROMPT], max_tokens=6, steering=spec)] == [
            one.text for one in lm.generate([PROMPT], max_tokens=6, steering=spec)
        ]
        assert torch.allclose(
            there.score([PROMPT], ["abc"], steering=spec), lm.score([PROMPT], ["abc"], steering=spec), atol=1e-4
        )
