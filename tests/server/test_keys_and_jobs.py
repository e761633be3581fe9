"""Keys, scopes, budgets, artifacts and jobs over HTTP; and what a restart and a kill leave of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

import midstream as ms
from midstream.core.artifacts import artifact_bytes
from midstream.formats.wire import decode_tensor
from server.kit import Serve
from server.test_refusals import refused

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def command(data_dir: Path, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "midstream.cli", *words, "--data-dir", str(data_dir), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


class Keyed:
    """A server with keys."""

    def __init__(self, tiny: Path, data_dir: Path, *arguments: str) -> None:
        self.data_dir = data_dir
        self.made = {
            "all": command(data_dir, "keys", "create", "all"),
            "poor": command(data_dir, "keys", "create", "poor", "--budget", "40"),
            "plain": command(data_dir, "keys", "create", "plain", "--scope", "complete"),
        }
        self.server = Serve(data_dir, ["--model", f"tiny={tiny}", "--limit", "lease_seconds=4", *arguments])

    def client(self, name: str) -> httpx2.Client:
        return self.server.client(self.made[name]["secret"])


@pytest.fixture(scope="module")
def keyed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    made = Keyed(tiny, tmp_path_factory.mktemp("keyed"))
    try:
        made.server.start()
        yield made
    finally:
        made.server.close()


def done(client: httpx2.Client, job_id: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (job := client.get(f"/v1/jobs/{job_id}").json())["status"] in ("queued", "running"):
        assert time.monotonic() < until
        time.sleep(0.1)
    return job


def test_who_may_do_what(keyed: Keyed) -> None:
    body = {"prompt": "hello", **GREEDY}
    with keyed.client("plain") as plain:
        assert plain.post("/v1/completions", json=body).status_code == 200
        refused(plain.post("/v1/completions", json={**body, "output_residual_stream": [1]}), 403)
        steer = {"ops": [{"kind": "add", "layers": [1], "vector": [1.0] * 32}]}
        refused(plain.post("/v1/completions", json={**body, "steering": steer}), 403)
    for key in ("", "ms-000000000000-" + "a" * 43, "nonsense"):
        with keyed.server.client(key) as nobody:
            error = refused(nobody.post("/v1/completions", json=body), 401)
            assert error["code"] == "invalid_api_key"
    assert httpx2.get(f"{keyed.server.url}/v1/models").status_code == 401


def test_a_revoked_key_opens_nothing_and_what_runs_ends(keyed: Keyed) -> None:
    made = command(keyed.data_dir, "keys", "create", "gone")
    with keyed.server.client(made["secret"]) as client:
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            command(keyed.data_dir, "keys", "revoke", made["id"])
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        refused(client.post("/v1/completions", json=body), 401)


def test_budgets(keyed: Keyed) -> None:
    with keyed.client("poor") as client:
        before = client.get("/v1/budget").json()
        assert (before["budget"], before["held"], before["spent"], before["left"]) == (40, 0, 0, 40)
        answer = client.post("/v1/completions", json={"prompt": "hello", **GREEDY}).json()
        used = answer["usage"]["total_tokens"]
        after = client.get("/v1/budget").json()
        assert (after["held"], after["spent"], after["left"]) == (0, used, 40 - used)
        error = refused(client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 100}), 402)
        assert error["param"] == "max_tokens"
        assert client.get("/v1/budget").json()["spent"] == used
        usage = client.get("/v1/usage").json()
        assert (usage["requests"], usage["prompt_tokens"], usage["completion_tokens"]) == (1, used - 4, 4)


def test_a_stream_that_breaks_off_pays_for_what_came(keyed: Keyed) -> None:
    with keyed.client("all") as client:
        before = client.get("/v1/budget").json()["spent"]
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
        until = time.monotonic() + 20
        while (now := client.get("/v1/budget").json())["held"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert 6 < now["spent"] - before < 206


def test_artifacts_belong_to_their_key(keyed: Keyed, lm: ms.LanguageModel) -> None:
    vector = torch.randn(32, generator=torch.Generator().manual_seed(4)).numpy()
    data = artifact_bytes(vector)
    name = ms.add(vector, layers=[1], strength=2.0).artifacts().popitem()[0]
    path = f"/v1/artifacts/{name}"
    body = {"prompt": "hello", **GREEDY, "output_residual_stream": [3]}
    steer = {"ops": [{"kind": "add", "layers": [1], "vector": name, "strength": 2.0}]}
    with keyed.client("all") as mine, keyed.client("poor") as other:
        refused(mine.post("/v1/completions", json={**body, "steering": steer}), 404)
        assert mine.put(path, content=data).status_code == 201
        assert mine.put(path, content=data).status_code == 201
        assert mine.head(path).status_code == 200
        assert mine.get(path).content == data
        assert mine.get("/v1/artifacts").json()["used_bytes"] == len(data)
        refused(other.get(path), 404)
        refused(other.delete(path), 404)
        assert other.head(path).status_code == 404
        refused(other.post("/v1/completions", json={**body, "max_tokens": 2, "steering": steer}), 404)
        found = mine.post("/v1/completions", json={**body, "steering": steer}).json()
        spec = ms.add(vector, layers=[1], strength=2.0)
        want = lm.capture(["hello"], layers=[3], max_tokens=4, ignore_eos=True, steering=spec).rows(3)
        rows = decode_tensor(found["activations"]["residual_stream"])[0]
        assert torch.allclose(rows, want, rtol=1e-3, atol=1e-3)
        refused(mine.put(path, content=data[:-1]), 400)
        assert mine.delete(path).status_code == 204
        refused(mine.get(path), 404)


def test_jobs(keyed: Keyed, lm: ms.LanguageModel) -> None:
    body = {"prompt": "hello", **GREEDY, "output_residual_stream": [2]}
    with keyed.client("all") as mine, keyed.client("poor") as other:
        before = mine.get("/v1/budget").json()["spent"]
        made = mine.post("/v1/jobs", json={"body": body})
        assert made.status_code == 202
        job = done(mine, made.json()["id"])
        assert job["status"] == "done"
        result = mine.get(f"/v1/jobs/{job['id']}/result").json()
        cap = lm.capture(["hello"], layers=[2], max_tokens=4, ignore_eos=True)
        assert result["choices"][0]["text"] == cap.outputs[0].text
        rows = decode_tensor(result["activations"]["residual_stream"])[0]
        assert torch.allclose(rows, cap.rows(2), rtol=1e-3, atol=1e-3)
        assert mine.get("/v1/budget").json()["spent"] - before == result["usage"]["total_tokens"]
        refused(other.get(f"/v1/jobs/{job['id']}"), 404)
        refused(other.get(f"/v1/jobs/{job['id']}/result"), 404)
        refused(other.delete(f"/v1/jobs/{job['id']}"), 404)
        assert mine.delete(f"/v1/jobs/{job['id']}").status_code == 204
        refused(mine.get(f"/v1/jobs/{job['id']}"), 404)


def test_handles_expire(tiny: Path, tmp_path: Path) -> None:
    server = Serve(tmp_path / "short", ["--model", str(tiny), "--limit", "held_seconds=1"])
    try:
        server.start()
        with server.client() as client:
            body = {"prompt": "hello", **GREEDY, "capture": {}, "activations_transport": "binary"}
            held = client.post("/v1/completions", json=body).json()["activations"]["resid_post"]
            assert client.get(f"/v1/activations/{held['handle']}").status_code == 200
            time.sleep(1.2)
            refused(client.get(f"/v1/activations/{held['handle']}"), 404)
    finally:
        server.close()


def test_keys_are_wanted_before_others_can_reach_it(tiny: Path, tmp_path: Path) -> None:
    server = Serve(tmp_path / "open", ["--model", str(tiny), "--host", "0.0.0.0"])
    with pytest.raises(AssertionError, match="midstream keys create"):
        server.start()


def test_sigterm_finishes_what_runs(tiny: Path, tmp_path: Path) -> None:
    server = Serve(tmp_path / "stop", ["--model", str(tiny)])
    try:
        server.start()
        body = {"prompt": "hello", "temperature": 0, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server._process is not None
            server._process.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.stop() == 0
    finally:
        server.close()


def test_a_job_that_is_cancelled_ends_and_pays_nothing(keyed: Keyed) -> None:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 240, "ignore_eos": True}
    with keyed.client("all") as client:
        before = client.get("/v1/budget").json()
        made = client.post("/v1/jobs", json={"body": body}).json()
        until = time.monotonic() + 20
        while client.get(f"/v1/jobs/{made['id']}").json()["status"] == "queued":
            assert time.monotonic() < until
            time.sleep(0.02)
        assert client.delete(f"/v1/jobs/{made['id']}").status_code == 204
        while (budget := client.get("/v1/budget").json())["held"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert budget["spent"] == before["spent"]


def test_a_batch_that_is_cancelled(keyed: Keyed) -> None:
    lines = [
        {"custom_id": str(place), "url": "/v1/completions",
         "body": {"prompt": "hello", "temperature": 0, "max_tokens": 240, "ignore_eos": True}}
        for place in range(40)
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    with keyed.client("all") as client:
        file = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}).json()
        given = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=given).json()
        found = client.post(f"/v1/batches/{batch['id']}/cancel").json()
        assert found["status"] == "cancelled"
        assert found["request_counts"]["total"] == 40
        assert found["request_counts"]["completed"] + found["request_counts"]["failed"] == 40
        refused(client.post(f"/v1/batches/{batch['id']}/cancel"), 409)
        until = time.monotonic() + 20
        while client.get("/v1/budget").json()["held"]:
            assert time.monotonic() < until
            time.sleep(0.05)
