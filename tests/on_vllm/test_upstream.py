"""Servers upstream of `midstream serve`: answers that do not fit, servers that fail, and how many wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import midstream as ms
from midstream.backends.serving import Grown
from midstream.backends.vllm.serve.upstream import UpstreamEngine
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError, EngineError, ModelLoadError, TransportError
from midstream.formats.artifacts import ArtifactRegistry
from on_vllm.asked import PROMPTS, heard, request, vector
from on_vllm.proxy import Proxy, Reply, Seen, broken, on, proxied, status
from on_vllm.serving import Server, Servers, free_port

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(bytes_llama: tuple[Path, ms.LanguageModel], servers: Servers) -> Server:
    return servers.get(bytes_llama[0])


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxied(server.url) as found:
        yield found


def upstream(scenario: Callable[[UpstreamEngine], Any], *urls: str, registry: ArtifactRegistry, **options: Any) -> Any:
    """What a scenario gives, with an engine of its own."""

    async def run() -> Any:
        given = {"base_url": list(urls), "retry_backoff": 0.01, "max_retries": 0, **options}
        engine = UpstreamEngine(BackendSpec("vllm-serve", "", given), registry=registry)
        await engine.start()
        try:
            return await scenario(engine)
        finally:
            await engine.close()
            assert not engine.well
            with pytest.raises(EngineError, match="closed"):
                await heard(engine, request(PROMPTS[0]))

    return asyncio.run(run())


def changed(edit: Callable[[dict[str, Any]], None], proxy: Proxy) -> None:
    """Let a proxy change the last event of each stream."""

    def fault(seen: Seen) -> Reply | None:
        if seen.path != COMPLETIONS:
            return None
        reply = seen.forward()
        events = reply.body.decode().split("\n\n")
        place = next(at for at, event in enumerate(events) if '"midstream"' in event)
        body = json.loads(events[place].removeprefix("data: "))
        edit(body)
        events[place] = f"data: {json.dumps(body)}"
        reply.body = "\n\n".join(events).encode()
        return reply

    proxy.fault = fault


@pytest.mark.parametrize(
    "edit",
    [
        lambda body: body.pop("activations"),
        lambda body: body.pop("midstream"),
        lambda body: body["activations"].pop("labels"),
        lambda body: body["activations"].pop("resid_post"),
        lambda body: body["activations"]["resid_post"].update(layers=[0, 1]),
        lambda body: body["activations"]["resid_post"].update(layers=[2]),
        lambda body: body["activations"]["resid_post"].update(shape=[1, 14, 64]),
        lambda body: body["activations"]["resid_post"].update(shape=[1, 7, 256]),
        lambda body: body["activations"]["labels"]["position"].reverse(),
        lambda body: body.update(activations=[]),
    ],
)
def test_an_answer_that_does_not_fit_is_said_not_to(
    edit: Callable[[dict[str, Any]], None], proxy: Proxy, registry: ArtifactRegistry
) -> None:
    async def scenario(engine: UpstreamEngine) -> None:
        changed(edit, proxy)
        asked = request(PROMPTS[1], CaptureSpec(layers=[1], select="prompt"), max_tokens=2)
        with pytest.raises((CaptureError, EngineError), match="Inference's answer does not fit the request"):
            await heard(engine, asked)
        proxy.fault = None
        assert (await heard(engine, asked)).end.activations is not None

    upstream(scenario, proxy.url, registry=registry)


def test_a_server_that_fails_before_any_token_is_replaced(
    proxy: Proxy, server: Server, registry: ArtifactRegistry, bytes_llama: tuple[Path, ms.LanguageModel]
) -> None:
    steer = ms.add(vector(5), layers=[1], strength=5.0)

    async def scenario(engine: UpstreamEngine) -> None:
        proxy.fault = lambda seen: None if seen.path == "/health" else status(503)(seen)
        asked = [request(prompt, None, steer) for prompt in PROMPTS]
        said = await asyncio.gather(*(heard(engine, one) for one in asked))
        due = bytes_llama[1].generate(PROMPTS, max_tokens=6, ignore_eos=True, steering=steer)
        assert [one.token_ids for one in said] == [one.token_ids for one in due]
        assert proxy.asked(COMPLETIONS) + proxy.asked(f"/v1/midstream/artifacts/{next(iter(steer.artifacts()))}")

    upstream(scenario, proxy.url, server.url, registry=registry)


def test_a_stream_that_breaks_off_fails_its_request(proxy: Proxy, server: Server, registry: ArtifactRegistry) -> None:
    async def scenario(engine: UpstreamEngine) -> None:
        proxy.fault = lambda seen: broken(400)(seen) if seen.path == COMPLETIONS else None
        pieces = engine.run(request(PROMPTS[1], max_tokens=30))
        assert isinstance(await anext(pieces), Grown)

        async def rest() -> list[Any]:
            return [piece async for piece in pieces]

        with pytest.raises(TransportError, match="broke off"):
            await rest()
        proxy.fault = None
        await heard(engine, request(PROMPTS[1]))

    upstream(scenario, proxy.url, registry=registry)


def test_an_engine_is_well_while_one_of_its_servers_is(
    proxy: Proxy, registry: ArtifactRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.backends.vllm.serve.upstream._PERIOD", 0.05)

    async def until(engine: UpstreamEngine, well: bool) -> None:
        for _ in range(100):
            if engine.well == well:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"well is {engine.well}")

    async def scenario(engine: UpstreamEngine) -> None:
        proxy.fault = on("/health", *[status(503)] * 1000)
        await until(engine, False)
        proxy.fault = None
        await until(engine, True)

    upstream(scenario, proxy.url, registry=registry)
    with pytest.raises(ModelLoadError, match="cannot be reached"):
        upstream(scenario, f"http://127.0.0.1:{free_port()}", registry=registry)


def test_more_than_the_servers_take_wait(server: Server, registry: ArtifactRegistry) -> None:
    async def scenario(engine: UpstreamEngine) -> None:
        tasks = [asyncio.create_task(heard(engine, request(PROMPTS[0], max_tokens=60))) for _ in range(3)]
        seen: set[tuple[int, int]] = set()
        while not all(task.done() for task in tasks):
            seen.add(engine.counts)
            await asyncio.sleep(0.005)
        assert (1, 2) in seen
        assert max(running for running, _ in seen) == 1
        assert len({(await task).token_ids for task in tasks}) == 1

    upstream(scenario, server.url, registry=registry, max_concurrency=1)
