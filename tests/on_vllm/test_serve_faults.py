"""What goes wrong between a client and its servers: sent again where that helps, said where it does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.core.errors import EngineError, ModelLoadError, PartialBatchError, PromptError, TransportError
from midstream.formats.artifacts import ArtifactRegistry
from on_vllm.kit import Checkpoint, assert_rows, relative
from on_vllm.proxy import Proxy, Reply, Seen, broken, garbled, on, proxied, slow, status
from on_vllm.serving import Server, Servers, ask, free_port, served, start

PROMPTS = [[5, 9, 13], list(range(20, 60)), [7], [30, 31, 32, 33]]
COMPLETIONS, CAPABILITIES = "/v1/completions", "/v1/midstream/capabilities"
GIVEN: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
FAST: dict[str, Any] = {"retry_backoff": 0.01}


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def server(source: Checkpoint, servers: Servers) -> Server:
    return servers.get(source.folder)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxied(server.url) as found:
        yield found


def test_what_may_go_better_is_sent_again(source: Checkpoint, proxy: Proxy) -> None:
    with served(proxy.url, **FAST) as lm:
        proxy.fault = on(COMPLETIONS, status(503), status(429), broken(20), garbled(b"<html>"), status(408))
        cap = lm.capture(PROMPTS, layers=[0, 2], **GIVEN)
        assert_rows(cap, source)
        assert proxy.asked(COMPLETIONS) == len(PROMPTS) + 5


def test_a_server_that_asks_for_patience_gets_it(proxy: Proxy) -> None:
    with served(proxy.url, **FAST) as lm:
        proxy.fault = on(COMPLETIONS, status(429, retry_after="1"))
        begun = time.monotonic()
        lm.generate(PROMPTS[:1], **GIVEN)
        assert time.monotonic() - begun > 1


def test_activations_that_break_off_are_fetched_again(source: Checkpoint, proxy: Proxy) -> None:
    seen: list[str] = []

    def fault(one: Seen) -> Reply | None:
        if not one.path.startswith("/v1/activations/") or one.method != "GET":
            return None
        seen.append(one.path)
        return broken(100)(one) if seen.count(one.path) == 1 else None

    with served(proxy.url, **FAST) as lm:
        proxy.fault = fault
        assert_rows(lm.capture(PROMPTS, layers=[1], **GIVEN), source)
    assert len(seen) == 2 * len(PROMPTS)


def test_a_server_that_boots_is_waited_for(proxy: Proxy) -> None:
    proxy.fault = on(CAPABILITIES, status(503), status(503))
    with served(proxy.url, **FAST) as lm:
        assert lm.facts.num_layers == 3
    proxy.fault = lambda seen: status(503)(seen)
    with pytest.raises(ModelLoadError, match="said 503: busy"), served(proxy.url, **FAST, max_retries=1):
        pass
    with pytest.raises(ModelLoadError, match="cannot be reached"), served(f"http://127.0.0.1:{free_port()}", **FAST):
        pass


def test_a_server_that_is_slow_is_said_to_be(proxy: Proxy) -> None:
    with served(proxy.url, **FAST, request_timeout=2.0, max_retries=1) as lm:
        proxy.fault = on(COMPLETIONS, slow(4.0), slow(4.0))
        with pytest.raises(PartialBatchError, match="did not answer in time: give a larger") as raised:
            lm.generate(PROMPTS[:1], **GIVEN)
        assert raised.value.again == [0]


def test_what_failed_can_be_sent_again(source: Checkpoint, proxy: Proxy) -> None:
    def fault(seen: Seen) -> Reply | None:
        if seen.path != COMPLETIONS:
            return None
        ids = json.loads(seen.body)["prompt"]
        return status(500)(seen) if any(ids[: len(one)] == one for one in (PROMPTS[1], PROMPTS[2])) else None

    due = source.hf.generate(PROMPTS, **GIVEN)
    with served(proxy.url, **FAST, max_retries=1) as lm:
        proxy.fault = fault
        with pytest.raises(PartialBatchError) as raised:
            lm.generate(PROMPTS, **GIVEN)
        assert sorted(raised.value.completions) == [0, 3]
        assert raised.value.again == [1, 2]
        assert raised.value.completions[3].token_ids == due[3].token_ids
        cap = lm.capture(PROMPTS, layers=[1], **GIVEN)
        assert sorted(cap.errors) == [1, 2]
        assert isinstance(cap.errors[1], TransportError)
        assert relative(cap.sample(3)[1], source.hf.capture(PROMPTS[3:], layers=[1], **GIVEN).rows(1)) < 1e-4
        with pytest.raises(PartialBatchError) as raised:
            lm.score(PROMPTS, [[3, 4]] * 4)
        assert raised.value.again == [1, 2]
        proxy.fault = None
        rest = lm.generate([PROMPTS[index] for index in raised.value.again], **GIVEN)
        assert [one.token_ids for one in rest] == [due[1].token_ids, due[2].token_ids]


def test_what_is_wrong_is_sent_once(proxy: Proxy) -> None:
    with served(proxy.url, **FAST) as lm:
        with pytest.raises(PromptError, match=r"prompt 0: the server refuses it: .*logprobs"):
            lm.generate([[5, 6]], max_tokens=3, logprobs=10_000)
        assert proxy.asked(COMPLETIONS) == 1


def test_a_proxy_that_drops_what_it_does_not_know_is_found_out(proxy: Proxy) -> None:
    def fault(seen: Seen) -> Reply | None:
        if seen.path != COMPLETIONS:
            return None
        reply = seen.forward()
        body = json.loads(reply.body)
        body.pop("midstream", None)
        reply.body = json.dumps(body).encode()
        return reply

    with served(proxy.url, **FAST) as lm:
        proxy.fault = fault
        with pytest.raises(PartialBatchError, match="is it a proxy that drops vllm_xargs"):
            lm.generate(PROMPTS[:1], **GIVEN)


def test_a_proxy_that_buffers_makes_a_stream_late_and_no_more(source: Checkpoint, proxy: Proxy) -> None:
    with served(proxy.url, **FAST) as lm:
        chunks = list(lm.stream(PROMPTS[0], layers=[1], **GIVEN))
        assert chunks[-1].capture is not None
        assert_rows(chunks[-1].capture, source)
        proxy.fault = on(COMPLETIONS, lambda _: None, broken(150))
        with pytest.raises(TransportError, match="broke off"):
            list(lm.stream(PROMPTS[0], **GIVEN))


def test_an_artifact_that_somebody_deletes_is_sent_again(
    source: Checkpoint, server: Server, proxy: Proxy, tmp_path: Path
) -> None:
    spec = ms.add(torch.randn(128, generator=torch.Generator().manual_seed(2)), layers=[1], strength=9.0)
    due = source.hf.generate(PROMPTS, steering=spec, **GIVEN)

    def fault(seen: Seen) -> Reply | None:
        if seen.path == COMPLETIONS and seen.count in (2, 4):
            for name in spec.artifacts():
                ask(f"{server.url}/v1/midstream/artifacts/{name}", method="DELETE")
        return None

    with served(proxy.url, **FAST, max_concurrency=1) as lm:
        proxy.fault = fault
        ours = lm.generate(PROMPTS, steering=spec, **GIVEN)
        assert [one.token_ids for one in ours] == [one.token_ids for one in due]
        puts = [path for method, path in proxy.seen if method == "PUT"]
        assert len(puts) >= 2


def test_a_directory_that_both_see(small_server: Server, shared: Path, tmp_path: Path, server: Server) -> None:
    spec = ms.add(torch.ones(128), layers=[1], strength=3.0)
    elsewhere = tmp_path / "elsewhere"
    with proxied(small_server.url) as proxy:
        with served(proxy.url, artifact_dir=str(shared)) as lm:
            lm.generate(PROMPTS[:1], steering=spec, **GIVEN)
        assert not any(method == "PUT" for method, _ in proxy.seen)
        assert next(iter(spec.artifacts())) in ArtifactRegistry(shared)
        with served(proxy.url, artifact_dir=str(elsewhere)) as lm:
            other = ms.add(torch.ones(128) * 2, layers=[1])
            with pytest.raises(EngineError, match="does not see"):
                lm.generate(PROMPTS[:1], steering=other, **GIVEN)
    with pytest.raises(ModelLoadError, match="reads no artifact_dir"), served(server, artifact_dir=str(shared)):
        pass


def test_names_of_models(source: Checkpoint, server: Server) -> None:
    with served(server, str(source.folder)) as lm:
        assert lm.facts.model_fingerprint.startswith("sha256:")
    with pytest.raises(ModelLoadError, match="and no 'other': name one of them"), served(server, "other"):
        pass


def test_a_config_that_differs_is_refused_and_a_tokenizer_warned_of(
    bytes_llama: tuple[Path, ms.LanguageModel], servers: Servers, tmp_path: Path, server: Server, source: Checkpoint
) -> None:
    folder, _ = bytes_llama
    mine = servers.get(folder)
    changed = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    with served(mine, tokenizer_name_or_path=str(other)):
        pass
    special = json.loads((other / "tokenizer_config.json").read_text()) | {"chat_template": "{{ 'other' }}"}
    (other / "tokenizer_config.json").write_text(json.dumps(special))
    (other / "chat_template.jinja").unlink(missing_ok=True)
    with (
        pytest.warns(UserWarning, match="the server's template is not the one"),
        served(mine, tokenizer_name_or_path=str(other)),
    ):
        pass
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelLoadError), served(mine, str(other)):
        pass
    with pytest.raises(ModelLoadError, match="the server's weights"), served(server, checkpoint=str(folder)):
        pass
    with served(server, checkpoint=str(source.folder)):
        pass


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_model(
    checkpoint: Callable[[str], Checkpoint], servers: Servers, tmp_path: Path
) -> None:
    """It dies in the middle, is up again with other weights, and is never taken for the one that was."""
    first, second = checkpoint("llama"), checkpoint("qwen2")
    port = free_port()
    one = start(first.folder, log=tmp_path / "one.log", port=port)
    try:
        with served(one, **FAST, max_retries=1) as lm:
            stream = lm.stream(PROMPTS[0], max_tokens=200, ignore_eos=True)
            next(stream)
            one.kill()
            with pytest.raises(TransportError):
                list(stream)
            with pytest.raises(PartialBatchError, match="cannot be reached"):
                lm.generate(PROMPTS, **GIVEN)
            other = start(second.folder, log=tmp_path / "two.log", port=port)
            try:
                with pytest.raises(EngineError, match="another model is served here"):
                    lm.generate(PROMPTS[:2], **GIVEN)
            finally:
                other.stop()
    finally:
        one.stop()


def test_an_aborted_call_leaves_nothing_behind(source: Checkpoint, server: Server) -> None:
    with served(server) as lm:
        stream = lm.stream(PROMPTS[1], max_tokens=150, ignore_eos=True, layers=[1])
        next(stream)
        stream.close()
        assert_rows(lm.capture(PROMPTS, layers=[1], **GIVEN), source)
        with pytest.raises(StopIteration):
            next(stream)
