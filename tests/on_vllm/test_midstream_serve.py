"""`midstream serve` in front of vLLM: its engine beside the process, and servers upstream; vllm-lens' client too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import midstream as ms
from midstream.formats.spec_json import encode_spec
from midstream.formats.wire import decode_tensor
from on_vllm.engine_options import ENGINE
from on_vllm.kit import Engines, relative
from on_vllm.lens_client import TEXT, vector
from on_vllm.serving import Servers
from on_vllm.test_serve_lens import asked, check_rows, check_steers, due
from server.kit import Serve

FRONTS = ("huggingface", "vllm", "upstream")


@pytest.fixture(scope="module", params=FRONTS)
def front(
    request: pytest.FixtureRequest,
    bytes_llama: tuple[Path, ms.LanguageModel],
    servers: Servers,
    engines: Engines,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serve]:
    folder = str(bytes_llama[0])
    engines.close()
    arguments = {
        "huggingface": ["--model", folder],
        "vllm": ["--model", folder, "--backend", "vllm", "--dtype", "float32", "--engine", json.dumps(ENGINE)],
        "upstream": [],
    }[request.param]
    if request.param == "upstream":
        arguments = ["--upstream", servers.get(folder).url]
    made = Serve(tmp_path_factory.mktemp(request.param), arguments)
    try:
        yield made.start()
    finally:
        made.close()


def test_rows_texts_and_steers(front: Serve, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    lm = bytes_llama[1]
    spec = ms.add(vector(1, 128)[0], layers=[1], strength=4.0)
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with front.client() as client:
        for more, given in (({}, {}), ({"steering": encode_spec(spec)}, {"steering": spec})):
            answer = client.post("/v1/completions", json={**body, **more, "output_residual_stream": [0, 2]})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            rows, text = due(lm, TEXT, [0, 2], **given)
            assert found["choices"][0]["text"] == text
            assert relative(decode_tensor(found["activations"]["residual_stream"]), rows) < 1e-4
            if more:
                assert [one["computed"] for one in found["midstream"]["steering"]] == [rows.shape[1]]
        with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "capture": {"layers": [1]}}
        ) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        *chunks, last = map(json.loads, lines[:-1])
        rows, text = due(lm, TEXT, [1])
        assert "".join(one["choices"][0]["text"] for one in chunks) == text
        site = last["activations"]["resid_post"]
        got = decode_tensor({name: of for name, of in site.items() if name != "layers"})
        assert relative(got, rows) < 1e-4
        bad = client.post("/v1/completions", json={**body, "output_residual_stream": [9]})
        assert bad.status_code == 400
        assert "it has no Layer 9." in bad.json()["error"]["message"]
        several = client.post("/v1/completions", json={**body, "n": 2, "seed": 1, "temperature": 1.0})
        assert len(several.json()["choices"]) == 2


def test_log_probabilities_are_the_models(front: Serve, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    body = {"prompt": TEXT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}
    with front.client() as client:
        found = client.post("/v1/completions", json=body).json()["choices"][0]
    want = bytes_llama[1].generate([TEXT], max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)[0]
    assert want.logprobs is not None
    assert found["logprobs"]["token_logprobs"] == pytest.approx([one.logprob for one in want.logprobs], abs=1e-3)
    assert len(found["prompt_logprobs"]) == len(want.prompt_token_ids)


def test_our_client_reads_from_it(front: Serve, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    with ms.load(None, backend="vllm-serve", base_url=front.url) as there:
        got = there.capture([TEXT], layers=[1], max_tokens=4, ignore_eos=True)
        want = bytes_llama[1].capture([TEXT], layers=[1], max_tokens=4, ignore_eos=True)
        assert relative(got.rows(1), want.rows(1)) < 1e-4


def test_vllm_lens_own_client(front: Serve, bytes_llama: tuple[Path, ms.LanguageModel], tmp_path: Path) -> None:
    told = asked(front.url, front.url, tmp_path)
    check_rows(told, bytes_llama[1])
    check_steers(told, bytes_llama[1])
    said = told[1]
    assert "code of a caller is never run: use steering" in said["hooks"]
    assert "it has no Layer 9." in said["no such layer"]
    assert "Set n to 1" in said["several"]
