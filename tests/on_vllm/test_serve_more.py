"""Several servers, calls that are awaited, the command line, adapters, and vLLM's hidden-states files online."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream.core.errors import ModelLoadError, UnsupportedOperationError
from on_vllm.checkpoints import lora_adapter
from on_vllm.kit import Checkpoint, Engines, assert_rows, relative
from on_vllm.proxy import Reply, Seen, broken, proxied
from on_vllm.serving import MIDSTREAM, Server, Servers, ask, served

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(3, 150, size=size).tolist() for size in (40, 7, 33, 64, 1, 20, 90, 12)]
GIVEN: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def server(source: Checkpoint, servers: Servers) -> Server:
    return servers.get(source.folder)


def test_several_servers_share_the_work_and_one_may_die(
    source: Checkpoint, server: Server, small_server: Server
) -> None:
    steer = ms.add(torch.randn(128, generator=torch.Generator().manual_seed(5)), layers=[1], strength=3.0)
    dead: list[str] = []

    def fault(seen: Seen) -> Reply | None:
        if seen.path == "/health" or (seen.path.startswith("/v1/") and dead):
            return Reply(503, {}, b"gone") if dead else None
        if seen.path == "/v1/completions" and seen.count > 2:
            dead.append(seen.path)
            return broken(10)(seen)
        return None

    with (
        proxied(server.url) as one,
        proxied(small_server.url) as two,
        ms.load(None, backend="vllm-serve", base_url=[one.url, two.url], retry_backoff=0.01) as lm,
    ):
        assert_rows(lm.capture(PROMPTS, layers=[0, 2], rows="prompt[-1]", **GIVEN), source)
        assert one.asked("/v1/completions") > 0 < two.asked("/v1/completions")
        one.fault = fault
        ours = lm.capture(PROMPTS, layers=[1], rows="prompt[-1], generated", steering=steer, **GIVEN)
        theirs = source.hf.capture(PROMPTS, layers=[1], rows="prompt[-1], generated", steering=steer, **GIVEN)
        assert not ours.errors
        assert relative(ours.rows(1), theirs.rows(1)) < 1e-4
        assert dead


def test_servers_of_other_models_are_no_pool(
    server: Server, bytes_llama: tuple[Path, ms.LanguageModel], servers: Servers
) -> None:
    other = servers.get(bytes_llama[0])
    with pytest.raises(ModelLoadError, match="has other"):
        ms.load(None, backend="vllm-serve", base_url=[server.url, other.url])


def test_calls_that_are_awaited_run_side_by_side_and_can_be_cancelled(source: Checkpoint, server: Server) -> None:
    async def several(lm: ms.LanguageModel) -> None:
        aio = lm.aio
        capture, completions, scores = await asyncio.gather(
            aio.capture(PROMPTS, layers=[1], **GIVEN),
            aio.generate(PROMPTS, **GIVEN),
            aio.score(PROMPTS, [[3, 4]] * len(PROMPTS)),
        )
        assert_rows(capture, source)
        assert [one.token_ids for one in completions] == [one.token_ids for one in capture.outputs]
        torch.testing.assert_close(scores, source.hf.score(PROMPTS, [[3, 4]] * len(PROMPTS)), atol=5e-4, rtol=1e-4)
        chunks = [chunk async for chunk in aio.stream(PROMPTS[0], **GIVEN)]
        assert chunks[-1].completion is not None
        assert chunks[-1].completion.token_ids == completions[0].token_ids
        task = asyncio.create_task(aio.generate(PROMPTS, max_tokens=150, ignore_eos=True))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            _, text = ask(f"{server.url}/metrics")
            running = [float(line.split()[-1]) for line in text.decode().splitlines()
                       if line.startswith("vllm:num_requests_running{")]  # fmt: skip
            if running == [0.0]:
                break
            await asyncio.sleep(0.1)
        assert running == [0.0], "the server was told"

    with served(server) as lm:
        asyncio.run(several(lm))
    with pytest.raises(UnsupportedOperationError, match="takes one call at a time"):
        _ = source.hf.aio


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MIDSTREAM[:-1], *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_the_command_line(bytes_llama: tuple[Path, ms.LanguageModel], servers: Servers, tmp_path: Path) -> None:
    folder, lm = bytes_llama
    server, out = servers.get(folder), tmp_path / "acts.safetensors"
    words = ("--backend", "vllm-serve", "--base-url", server.url, "--model", str(folder), "--prompt", "hello")
    done = run("capture", *words, "--layers", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    due = lm.capture(["hello"], layers=[1])
    found = ms.CaptureResult.load(out)
    assert found.labels == due.labels
    assert relative(found.rows(1), due.rows(1)) < 1e-4
    done = run("generate", *words, "--max-tokens", "5", "--json")
    assert done.returncode == 0, done.stderr
    done = run("generate", "--model", str(folder), "--prompt", "x", "--max-tokens", "1", "--base-url", server.url)
    assert done.returncode == 2
    assert "--base-url" in done.stderr
    done = run("vllm-serve", str(folder), "--dry-run", "--port", "9", "--artifact-dir", "x")
    assert done.returncode == 0, done.stderr
    assert f"vllm serve {folder} --port 9" in done.stdout
    assert "VLLM_PLUGINS=" in done.stdout


@pytest.mark.slow
def test_an_adapter_and_a_checkpoint(source: Checkpoint, servers: Servers, tmp_path: Path) -> None:
    merged, adapter = lora_adapter(tmp_path / "adapter")
    given: dict[str, Any] = {"sites": ["resid_post", "head_out"], **GIVEN}
    want, plain = ms.load(merged).capture(PROMPTS, **given), source.hf.capture(PROMPTS, **given)
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    server = servers.get(source.folder, "--enable-lora", "--max-lora-rank", "8", environment=environment)
    for _ in range(2):  # the second finds it there
        with served(server, lora=str(adapter)) as lm:
            ours = lm.capture(PROMPTS, **given)
            assert all(relative(ours.tensors[key], rows) < 1e-4 for key, rows in want.tensors.items())
    names = [one["id"] for one in ask(f"{server.url}/v1/models")[1]["data"]]
    assert sum(name.startswith("midstream-") for name in names) == 1
    with served(server) as lm:
        ours = lm.capture(PROMPTS, **given)
        assert all(relative(ours.tensors[key], rows) < 1e-4 for key, rows in plain.tensors.items())
    servers.stop(server)
    merged.save_pretrained(tmp_path / "merged")
    checkpoint = str(tmp_path / "merged")
    server = servers.get(source.folder, "--checkpoint", checkpoint, "--enable-lora")
    with served(server, checkpoint=checkpoint) as lm:
        ours = lm.capture(PROMPTS, **given)
        assert all(relative(ours.tensors[key], rows) < 1e-4 for key, rows in want.tensors.items())
    with pytest.raises(ModelLoadError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"), served(server, lora=str(adapter)):
        pass
    servers.stop(server)


def test_an_adapter_where_none_is_taken(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="--enable-lora"), served(server, lora=str(tmp_path)):
        pass


@pytest.mark.slow
def test_hidden_states_files_online(source: Checkpoint, servers: Servers, tmp_path: Path, engines: Engines) -> None:
    """As vLLM's documentation has it: `--kv-transfer-config`, and the path in the answer."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    from midstream.backends.vllm import hidden_states_files

    transfer = json.dumps(hidden_states_files(tmp_path))
    server = servers.get(source.folder, "--kv-transfer-config", transfer)
    body = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    wishes = {"aux_layer_ids": [0, 2, 3], "include_output_tokens": True}
    status, answer = ask(f"{server.url}/v1/completions", {**body, "kv_transfer_params": wishes})
    assert status == 200, answer
    found = load_hidden_states(answer["kv_transfer_params"]["hidden_states_path"])
    ids = [*PROMPTS[0], *answer["choices"][0]["token_ids"][:-1]]
    assert found["token_ids"].tolist() == ids
    true = source.oracle(tuple(ids))
    for place, key in enumerate((("resid_pre", 0), ("resid_post", 1), ("resid_post", 2))):
        assert relative(found["hidden_states"][:, place], true[key]) < 1e-4
    for wrong in ({"aux_layer_ids": [9]}, {"hidden_states_path": "/etc/x"}):
        status, answer = ask(f"{server.url}/v1/completions", {**body, "kv_transfer_params": wrong})
        assert status == 400
        assert answer["error"]["param"].startswith("kv_transfer_params.")
    # captures go on beside files
    with served(server) as lm:
        assert_rows(lm.capture(PROMPTS, layers=[1], **GIVEN), source)
    servers.stop(server)
