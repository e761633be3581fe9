"""The engines of `midstream serve`: vLLM's asynchronous one in this process, and servers upstream."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import midstream as ms
from midstream.backends.serving import Ended, ServedRequest
from midstream.backends.vllm.asynchronous import AsyncVllmEngine
from midstream.backends.vllm.serve.upstream import UpstreamEngine
from midstream.core.artifacts import Artifact, artifact_bytes
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError, EngineError, ModelLoadError, PromptError, SpecError
from midstream.core.generation import derive_seed
from midstream.core.interventions import InterventionSpec
from midstream.formats.artifacts import ArtifactRegistry
from on_vllm.asked import PROMPTS, Said, heard, request, too_many, vector, waiting
from on_vllm.kit import ENGINE, Engines, relative
from on_vllm.serving import Server, Servers, ask


@dataclass(frozen=True, eq=False)
class Kit:
    """An engine, the loop that it lives in, and the same model in process."""

    engine: Any
    runner: asyncio.Runner
    hf: ms.LanguageModel
    server: Server | None

    def heard(self, *requests: ServedRequest) -> list[Said]:
        async def all_of_them() -> list[Said]:
            return await asyncio.gather(*(heard(self.engine, one) for one in requests))

        return self.runner.run(all_of_them())

    async def at_work(self) -> int:
        """How many requests the engine itself has."""
        if self.server is None:
            return self.engine._up.engine.client.output_processor.get_num_unfinished_requests()
        _, text = await asyncio.to_thread(ask, f"{self.server.url}/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith("vllm:num_requests_running{")]
        return int(sum(float(line.split()[-1]) for line in lines))


@pytest.fixture(scope="module", params=["vllm", "upstream"])
def kit(
    request: pytest.FixtureRequest,
    bytes_llama: tuple[Path, ms.LanguageModel],
    servers: Servers,
    registry: ArtifactRegistry,
) -> Iterator[Kit]:
    folder, hf = bytes_llama
    server = None if request.param == "vllm" else servers.get(folder)
    with asyncio.Runner() as runner:
        if server is None:
            spec = BackendSpec("vllm", str(folder), {"dtype": "float32", "engine_kwargs": ENGINE})
            engine: Any = AsyncVllmEngine(spec, registry=registry)
        else:
            engine = UpstreamEngine(BackendSpec("vllm-serve", "", {"base_url": server.url}), registry=registry)
        try:
            runner.run(engine.start())
            yield Kit(engine, runner, hf, server)
        finally:
            runner.run(engine.close())
            runner.run(engine.close())


def rows_of(end: Ended) -> dict[tuple[str, int], torch.Tensor]:
    assert end.activations is not None
    return {
        (stack.site, layer): rows
        for stack in end.activations.stacks
        for layer, rows in zip(stack.layers, stack.tensor, strict=True)
    }


def test_what_it_says_of_itself(kit: Kit, bytes_llama: tuple[Path, ms.LanguageModel]) -> None:
    hf, engine = bytes_llama[1], kit.engine
    assert engine.facts.num_layers == hf.facts.num_layers == 3
    assert engine.facts.context_length == 256
    assert engine.layouts["resid_post"][2].width == 128
    assert "resid_post" in engine.capabilities.capture.sites
    assert engine.tokenizer.decode(engine.tokenizer("hello")["input_ids"], skip_special_tokens=True) == "hello"
    assert engine.identity.facts["model_fingerprint"] == engine.facts.model_fingerprint
    assert engine.identity.eos == (1,)
    assert engine.identity.fingerprints["weights"].startswith("sha256:")
    assert engine.well
    assert engine.counts == (0, 0)


def test_requests_that_come_one_after_another_have_their_own_rows_and_steers(kit: Kit) -> None:
    steers = [None, ms.add(vector(1), layers=[1], strength=9.0), ms.ablate(vector(2), layers=[0, 2])]
    captures = [
        None,
        CaptureSpec(layers=[0, 2]),
        CaptureSpec(sites=["resid_post", "q"], layers=[1], select="prompt[-1], generated"),
        CaptureSpec(layers=[1], dtype="float16", select="prompt[2:5]"),
    ]
    asked = [
        request(prompt, captures[place % 4], steers[place % 3], max_tokens=3 + place)
        for place, prompt in enumerate(PROMPTS * 2)
    ]

    async def staggered() -> list[Said]:
        tasks = []
        for one in asked:
            tasks.append(asyncio.create_task(heard(kit.engine, one)))
            await asyncio.sleep(0.02)
        return await asyncio.gather(*tasks)

    pieces: list[int] = []
    for one, said in zip(asked, kit.runner.run(staggered()), strict=True):
        prompt, count = list(one.prompt.token_ids), one.params.max_tokens
        given: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "steering": one.steering}
        (due,) = kit.hf.generate([prompt], **given)
        assert said.token_ids == due.token_ids
        pieces.append(said.pieces)
        assert said.end.finish_reason == "length"
        assert [(line.op, line.layer, line.selected) for line in said.end.steering] == [
            (line.op, line.layer, line.selected) for line in due.steering
        ]
        if one.capture is None:
            assert said.end.activations is None
            continue
        spec = one.capture
        cap = kit.hf.capture(
            [prompt],
            sites=list(spec.sites),
            layers=list(spec.layers or ()),
            rows=spec.select,
            dtype=spec.dtype,
            **given,
        )
        found = said.end.activations
        assert found is not None
        assert found.position.tolist() == cap.labels.position.tolist()
        assert found.token_id.tolist() == cap.labels.token_id.tolist()
        assert found.generated.tolist() == cap.labels.generated.tolist()
        assert found.receipt.selected == found.receipt.computed == len(cap.labels)
        rows = rows_of(said.end)
        assert set(rows) == set(cap.tensors)
        for place, due_rows in cap.tensors.items():
            assert rows[place].dtype == due_rows.dtype
            assert relative(rows[place], due_rows) < (1e-4 if spec.dtype is None else 2e-3), place
    assert max(pieces) > 1


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
WAYS: list[dict[str, Any]] = [
    {"seed": 7},
    {"seed": 3, "temperature": 1.3, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
    {"logprobs": 3},
    {"logprobs": 0, "prompt_logprobs": 2, "seed": 5},
    {"stop_token_ids": tuple(range(100)), "max_tokens": 40},
    {"ignore_eos": False, "max_tokens": 30, "min_tokens": 4, "seed": 1},
    {"constraint": {"json_schema": SCHEMA}, "max_tokens": 20},
    {"constraint": {"regex": "[ab]{3}"}, "max_tokens": 20, "seed": 2},
    {"constraint": {"choice": ["yes", "no"]}, "max_tokens": 20},
]


def test_tokens_are_those_of_an_lm_with_the_same_seed(
    kit: Kit, engines: Engines, bytes_llama: tuple[Path, ms.LanguageModel]
) -> None:
    lm = engines.get(bytes_llama[0])
    (whole,) = lm.generate([PROMPTS[1]], max_tokens=24, ignore_eos=True, seed=9)
    assert whole.text
    ways = [*WAYS, {"stop": (whole.text[6:8],), "max_tokens": 24, "seed": 9}]
    asked = [request(PROMPTS[1], **{**way, "seed": derive_seed(way.get("seed"), 0, 0)}) for way in ways]
    for way, one, said in zip(ways, asked, kit.heard(*asked), strict=True):
        given = {"max_tokens": one.params.max_tokens, "ignore_eos": one.params.ignore_eos, **way}
        (due,) = lm.generate([PROMPTS[1]], **given)
        assert (said.token_ids, said.end.finish_reason) == (due.token_ids, due.finish_reason), way
        for mine, theirs in ((said.logprobs, due.logprobs), (said.end.prompt_logprobs, due.prompt_logprobs)):
            assert bool(mine) == bool(theirs)
            for a, b in zip(mine or (), theirs or (), strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert (a.token_id, [token for token, _ in a.top]) == (b.token_id, [token for token, _ in b.top])
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_unseeded_samples_differ(kit: Kit) -> None:
    one, two = kit.heard(*[request(PROMPTS[0], max_tokens=20, temperature=1.5) for _ in range(2)])
    assert one.token_ids != two.token_ids


def test_a_tensor_by_id_is_found_in_the_registry(kit: Kit, registry: ArtifactRegistry) -> None:
    array = np.asarray(vector(3), dtype=np.float32)
    name = Artifact.of(array).id
    registry.put_bytes(name, artifact_bytes(array))
    by_id = InterventionSpec.of({"ops": [{"kind": "add", "layers": [1], "vector": name, "strength": 20.0}]})
    asked = request(PROMPTS[0], None, by_id)
    kit.engine.check(asked)
    (said,) = kit.heard(asked)
    (due,) = kit.hf.generate(
        [PROMPTS[0]], max_tokens=6, ignore_eos=True, steering=ms.add(vector(3), layers=[1], strength=20.0)
    )
    assert said.token_ids == due.token_ids


def test_what_is_no_prompt_is_generation(kit: Kit) -> None:
    """A reference after a prompt: its rows are generated ones."""
    ids = PROMPTS[2]
    capture = CaptureSpec(layers=[1], select="generated")
    steer = ms.add(vector(4), layers=[0], strength=9.0, rows="generated")
    (said,) = kit.heard(request(ids, capture, steer, 30, max_tokens=1, prompt_logprobs=0))
    found = said.end.activations
    assert found is not None
    assert found.position.tolist() == [30, 31, 32]
    assert found.generated.all()
    assert [line.selected for line in said.end.steering] == [3]
    score = kit.hf.score([ids[:30]], [ids[30:]], steering=steer)
    assert said.end.prompt_logprobs is not None
    mine = [one.logprob for one in said.end.prompt_logprobs[30:] if one is not None]
    torch.testing.assert_close(torch.tensor([mine]), score, atol=5e-4, rtol=1e-4)


def test_the_prefix_cache_is_told_of(kit: Kit) -> None:
    ids = list(range(3, 131))
    kit.heard(request(ids))
    capture = CaptureSpec(layers=[1], select="prompt[-1]")
    (said,) = kit.heard(request(ids, capture))
    assert said.end.cached == 96
    cap = kit.hf.capture([ids], layers=[1], rows="prompt[-1]", max_tokens=6, ignore_eos=True)
    assert relative(rows_of(said.end)["resid_post", 1], cap.rows(1)) < 1e-4


def test_a_request_that_is_given_up_leaves_nothing_behind(kit: Kit) -> None:
    async def given_up(by: str) -> str:
        asked = request(PROMPTS[0], CaptureSpec(), ms.add(vector(1), layers=[1]), max_tokens=200)
        if by == "closing":
            async with aclosing(kit.engine.run(asked)) as pieces:
                await anext(pieces)
                (name,) = kit.engine._asked
                assert kit.engine.counts == (1, 0)
        else:
            (task,) = await waiting(kit.engine, asked)
            (name,) = kit.engine._asked
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert kit.engine.counts == (0, 0)
        for _ in range(100):
            if not await kit.at_work():
                break
            await asyncio.sleep(0.05)
        assert await kit.at_work() == 0
        return name

    for by in ("closing", "cancelling"):
        name = kit.runner.run(given_up(by))
        kit.heard(request(PROMPTS[1]))  # the workers hear with the next step of what has ended
        if kit.server is None:
            kit.runner.run(unknown(kit.engine, name))


async def unknown(engine: AsyncVllmEngine, name: str) -> None:
    """Wait until the workers have forgotten a request."""
    for _ in range(50):
        (part,) = await engine._up.engine.collect(name)
        if "does not know it" in str(part.described[0]["error"]):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("its rows are still there")


def test_a_request_that_fails_fails_alone(kit: Kit) -> None:
    """Rows that become infinite cannot be kept as integers."""
    bad = request(
        PROMPTS[3], CaptureSpec(layers=[1], dtype="int32"), ms.add(vector(1) * 1e30, layers=[0], strength=1e30)
    )

    async def side_by_side() -> list[Said | BaseException]:
        asked = [request(PROMPTS[0], CaptureSpec(layers=[1])), bad, request(PROMPTS[2])]
        return await asyncio.gather(*(heard(kit.engine, one) for one in asked), return_exceptions=True)

    one, failed, two = kit.runner.run(side_by_side())
    assert isinstance(failed, CaptureError), failed
    for said, prompt in ((one, PROMPTS[0]), (two, PROMPTS[2])):
        assert isinstance(said, Said)
        (due,) = kit.hf.generate([prompt], max_tokens=6, ignore_eos=True)
        assert said.token_ids == due.token_ids
    assert kit.engine.counts == (0, 0)
    assert kit.engine.well


NO_SUCH = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"capture": {"layers": [3]}}, r"E_LAYER_RANGE at capture.layers\[0\]: no layer 3"),
        ({"capture": {"sites": ["router_logits"]}}, "E_SITE at capture.sites: this model has no router_logits"),
        ({"steering": {"kind": "add", "layers": [1], "vector": NO_SUCH}}, r"E_ARTIFACT_MISSING at steering.ops\[0\]"),
        ({"steering": {"kind": "add", "layers": [9], "vector": [0.0] * 128}}, r"E_LAYER_RANGE at steering.ops\[0\]"),
        ({"steering": {"kind": "add", "layers": [1], "vector": [0.0] * 4}}, r"E_BAD_PARAM at steering.ops\[0\]"),
        ({"prompt": [5, 9999]}, "prompt 0 has token id 9999; the model has ids 0 to 257"),
        ({"prompt": [5] * 250, "max_tokens": 7}, "prompt 0 has 250 tokens and max_tokens is 7"),
        ({"prompt_len": 9}, "E_BAD_PARAM at prompt_len: is 9, of a prompt of 7 tokens"),
        ({"constraint": {"choice": []}}, "E_CONSTRAINT at constraint.choice"),
        ({"constraint": {"regex": "a"}, "ignore_eos": True}, "E_CONSTRAINT at generation.ignore_eos"),
        ({"extra": {"num_beams": 2}}, "E_UNKNOWN_KIND at generation.extra.num_beams"),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(kit: Kit, given: dict[str, Any], message: str) -> None:
    fields = {"prompt": PROMPTS[1], **given}
    if "capture" in fields:
        fields["capture"] = CaptureSpec.of(fields["capture"])
    if "steering" in fields:
        fields["steering"] = InterventionSpec.of({"ops": [fields["steering"]]})
    asked = request(fields.pop("prompt"), **fields)
    with pytest.raises((SpecError, PromptError), match=message):
        kit.runner.run(asyncio.to_thread(kit.engine.check, asked))
    with pytest.raises((SpecError, PromptError), match=message):
        kit.heard(asked)
    assert kit.engine.counts == (0, 0)


def test_what_vllm_refuses_is_refused_in_its_words(kit: Kit) -> None:
    asked = request(PROMPTS[1], constraint={"regex": "[a"})
    if kit.server is None:
        with pytest.raises(PromptError, match="vLLM refuses it"):
            kit.engine.check(asked)
    with pytest.raises((PromptError, EngineError)):
        kit.heard(asked)
    assert kit.engine.well


def test_an_engine_that_is_closed_tells_whoever_waits(kit: Kit) -> None:
    async def closed() -> None:
        tasks = await waiting(kit.engine, *too_many())
        if kit.server is None:  # one that vLLM is still making ready, and does not know yet
            processor = kit.engine._up.engine.client.input_processor
            real = processor.process_inputs_async

            async def slow(*given: Any, **more: Any) -> Any:
                await asyncio.sleep(1)
                return await real(*given, **more)

            processor.process_inputs_async = slow
            tasks.append(asyncio.create_task(heard(kit.engine, request(PROMPTS[0]))))
            await asyncio.sleep(0.2)
        await kit.engine.close()
        failed = [one for one in await asyncio.gather(*tasks, return_exceptions=True) if not isinstance(one, Said)]
        assert len(failed) > 7
        assert all(isinstance(one, EngineError) and "was closed" in str(one) for one in failed), failed
        assert kit.engine.counts == (0, 0)
        assert not kit.engine.well
        with pytest.raises(EngineError, match="was closed"):
            await heard(kit.engine, request(PROMPTS[0]))

    kit.runner.run(closed())


@pytest.mark.slow
def test_an_engine_that_dies_tells_whoever_waits(
    bytes_llama: tuple[Path, ms.LanguageModel], registry: ArtifactRegistry
) -> None:
    async def died() -> None:
        spec = BackendSpec("vllm", str(bytes_llama[0]), {"dtype": "float32", "engine_kwargs": ENGINE})
        engine = AsyncVllmEngine(spec, registry=registry)
        with pytest.raises(EngineError, match="start it"):
            await heard(engine, request(PROMPTS[0]))
        await engine.start()
        try:
            tasks = await waiting(engine, *too_many())
            for process in engine._up.engine.client.engine_core.resources.engine_manager.processes:
                os.kill(process.pid, signal.SIGKILL)
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
            failed = [one for one in found if not isinstance(one, Said)]
            assert len(failed) > 7
            assert all(isinstance(one, EngineError) for one in failed), failed
            assert not engine.well
            assert engine.counts == (0, 0)
            with pytest.raises(EngineError):
                await heard(engine, request(PROMPTS[0]))
        finally:
            await engine.close()
            await engine.close()

    asyncio.run(died())


def test_a_model_that_cannot_be_served_is_said_to_be(tmp_path: Path, registry: ArtifactRegistry) -> None:
    async def scenario() -> None:
        engine = AsyncVllmEngine(BackendSpec("vllm", str(tmp_path)), registry=registry)
        with pytest.raises(ModelLoadError, match="give a folder or a hub id"):
            await engine.start()
        await engine.close()

    asyncio.run(scenario())
    with pytest.raises(SpecError, match="E_UNKNOWN_FIELD at options"):
        AsyncVllmEngine(BackendSpec("vllm", str(tmp_path), {"base_url": "x"}))
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at options.base_url"):
        UpstreamEngine(BackendSpec("vllm-serve", ""))
