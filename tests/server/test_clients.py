"""Real clients, unchanged: the `openai` SDK and `curl`."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

import midstream as ms
from midstream.formats.wire import decode_tensor
from server.kit import Serve

PROMPT = "What is steering?"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def sdk(server: Serve) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_completions_of_the_sdk(sdk: openai.OpenAI, lm: ms.LanguageModel) -> None:
    given: Any = {"output_residual_stream": [1]}
    found = sdk.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, extra_body=given)
    cap = lm.capture([PROMPT], layers=[1], max_tokens=5)
    assert found.choices[0].text == cap.outputs[0].text
    assert found.usage is not None
    assert found.usage.completion_tokens == 5
    rows = decode_tensor((found.model_extra or {})["activations"]["residual_stream"])
    assert torch.allclose(rows[0], cap.rows(1), rtol=1e-3, atol=1e-3)


def test_chats_of_the_sdk(sdk: openai.OpenAI, lm: ms.LanguageModel) -> None:
    found = sdk.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )
    assert found.choices[0].message.content == lm.generate([CHAT], max_tokens=5)[0].text
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.content or []) == 5


def test_streams_of_the_sdk(sdk: openai.OpenAI, lm: ms.LanguageModel) -> None:
    want = lm.generate([PROMPT], max_tokens=5)[0].text
    given: Any = {"output_residual_stream": [1]}
    text, last = "", None
    for chunk in sdk.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, stream=True, extra_body=given
    ):
        text += "".join(choice.text for choice in chunk.choices)
        last = chunk
    assert text == want
    assert last is not None
    assert "activations" in (last.model_extra or {})
    pieces = sdk.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    said, usage = "", None
    for piece in pieces:
        said += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    assert said == lm.generate([CHAT], max_tokens=5)[0].text
    assert usage is not None
    assert usage.completion_tokens == 5


def test_models_and_errors_of_the_sdk(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert sdk.models.retrieve("tiny").id == model.id
    assert (model.model_extra or {})["capabilities"]["n_layers"] == 4
    with pytest.raises(openai.BadRequestError, match="Set n to 1") as caught:
        sdk.completions.create(model="tiny", prompt=PROMPT, n=2, extra_body={"output_residual_stream": [1]})
    assert (caught.value.param, caught.value.code) == ("n", "invalid_request")
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="another", prompt=PROMPT)


def batch_file(count: int) -> bytes:
    lines = [
        {"custom_id": f"request-{place}", "method": "POST", "url": "/v1/completions",
         "body": {"model": "tiny", "prompt": f"number {place}", "max_tokens": 3, "temperature": 0,
                  "output_residual_stream": [place % 4]}}
        for place in range(count)
    ]  # fmt: skip
    lines[-1]["body"]["max_tokens"] = -1
    return "\n".join(map(json.dumps, lines)).encode()


def test_files_and_batches_of_the_sdk(sdk: openai.OpenAI, lm: ms.LanguageModel) -> None:
    content = batch_file(6)
    file = sdk.files.create(file=("requests.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.filename, file.bytes) == ("requests.jsonl", len(content))
    assert sdk.files.content(file.id).read() == content
    assert file.id in [one.id for one in sdk.files.list()]
    batch = sdk.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"for": "a test"}
    )
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < until, batch
        time.sleep(0.2)
        batch = sdk.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "a test"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 5, 1)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    answers = [json.loads(line) for line in sdk.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == [f"request-{place}" for place in range(5)]
    for one in answers:
        place = int(one["custom_id"].removeprefix("request-"))
        body = one["response"]["body"]
        cap = lm.capture([f"number {place}"], layers=[place % 4], max_tokens=3)
        assert one["response"]["status_code"] == 200
        assert body["choices"][0]["text"] == cap.outputs[0].text
        rows = decode_tensor(body["activations"]["residual_stream"])
        assert torch.allclose(rows[0], cap.rows(place % 4), rtol=1e-3, atol=1e-3)
    (wrong,) = [json.loads(line) for line in sdk.files.content(batch.error_file_id).text.splitlines()]
    assert wrong["custom_id"] == "request-5"
    assert wrong["response"]["status_code"] == 400
    assert sdk.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(file.id)


def test_a_batch_of_a_wrong_file_says_on_which_line(sdk: openai.OpenAI) -> None:
    content = b'{"custom_id": "a", "url": "/v1/completions", "body": {}}\nnothing\n'
    file = sdk.files.create(file=("requests.jsonl", io.BytesIO(content)), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [one.line for one in batch.errors.data or []] == [2]


def test_curl(server: Serve) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "output_residual_stream": True})
    command = [
        "curl",
        "-sS",
        "--fail-with-body",
        f"{server.url}/v1/completions",
        "-H",
        "content-type: application/json",
    ]
    said = subprocess.run([*command, "-d", body], capture_output=True, text=True, check=True).stdout
    rows = decode_tensor(json.loads(said)["activations"]["residual_stream"])
    assert rows.shape[0] == 4
    bad = subprocess.run([*command, "-d", "{"], capture_output=True, text=True, check=False)
    assert bad.returncode != 0
    assert "no JSON" in json.loads(bad.stdout)["error"]["message"]
