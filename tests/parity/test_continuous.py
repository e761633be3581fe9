"""The embedded engine: each request gets what it gets alone, whatever else comes and goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.backends.huggingface.backend import HuggingFaceBackend
from midstream.backends.serving import ServedRequest
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError
from midstream.core.generation import GenerationParams
from midstream.core.interventions import InterventionSpec
from midstream.core.items import InterventionEntry, ScoringItem
from midstream.core.prompts import PreparedPrompt
from parity.architectures import ARCHITECTURES, WINDOW
from parity.continuous_kit import (
    KEPT,
    Served,
    asked,
    ids_of,
    mixed,
    nothing_is_held,
    same,
    served,
    staggered,
    vector,
)

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

#: Models that are refused: not causal, or no cache of keys and values alone.
REFUSED = {"t5", "gemma3n"}
UNDECODED = {"mamba", "qwen3_next"}
#: Models whose own float32 is further from itself in a batch than the bound.
ROUNDING = {"qwen3_next": 10.0, "gemma4_moe": 10.0}
EVERY = [name for name in ARCHITECTURES if name not in REFUSED | UNDECODED]


# --- what comes is what each request gives alone


@pytest.mark.parametrize("name", EVERY)
def test_every_architecture(name: str, tools: Any) -> None:
    one = served(ARCHITECTURES[name]())
    spec = CaptureSpec(sites=("resid_pre", "resid_post"))
    lengths = (5, 3 * WINDOW + 1, 1, WINDOW + 1)
    requests = [asked(length, seed, capture=spec, max_tokens=WINDOW + 2) for seed, length in enumerate(lengths)]
    want = one.alone(requests)

    async def run() -> list[Any]:
        async with one.engine(prefill_chunk=7) as engine:
            return await staggered(engine, requests, (0, 2, 3, 4))

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools, ROUNDING.get(name, 1.0))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize(("chunk", "batch", "step"), [(512, 64, 0), (5, 64, 3), (8, 3, 1)])
def test_requests_that_differ_in_everything(name: str, chunk: int, batch: int, step: int, tools: Any) -> None:
    one = served(ARCHITECTURES[name]())
    requests = mixed()
    want = one.alone(requests)

    async def run() -> list[Any]:
        async with one.engine(prefill_chunk=chunk, max_batch=batch) as engine:
            for request in requests:
                engine.check(request)
            found = await staggered(engine, requests, [step] * len(requests))
            again = await staggered(engine, requests[::-1], [2 * step] * len(requests))
            assert engine.well
            nothing_is_held(engine)
            return [*found, *again[::-1]]

    for got, expected in zip(asyncio.run(run()), [*want, *want], strict=True):
        same(got, expected, tools)


@pytest.mark.parametrize("name", ["qwen3_moe", "llava", "deepseek_v3"])
def test_every_site_and_steered_routers(name: str, tools: Any) -> None:
    one = served(ARCHITECTURES[name]())
    session = one.backend.open_session()
    sites = tuple(session.taps.layouts)
    session.close()
    requests = [asked(3 + 5 * place, place, capture=CaptureSpec(sites=sites)) for place in range(4)]
    if "router_logits" in sites:
        shift = [{"kind": "router", "layers": [2], "on": [1], "off": [3]}]
        requests.append(
            asked(6, 9, steering=shift, capture=CaptureSpec(sites=("router_logits", "mlp_out"), layers=[2]))
        )
    want = one.alone(requests)

    async def run() -> list[Any]:
        async with one.engine() as engine:
            return await staggered(engine, requests, [3] * len(requests))

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools)


def test_a_model_that_does_not_pad_runs_equal_lengths_together(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midstream.backends.huggingface.continuous.worker._LISTENS", 10.0)
    model = ARCHITECTURES["llama"]()
    one = served(model)
    requests = [asked(length, seed, capture=CaptureSpec(layers=[2])) for seed, length in enumerate((6, 9, 6, 3, 8))]
    want = one.alone(requests)
    taps = one.backend._examined()
    object.__setattr__(taps, "pads_left", False)

    async def run() -> list[Any]:
        async with one.engine() as engine:
            with tools.calls(model.get_input_embeddings()) as seen:
                found = await staggered(engine, requests, (0, 0, 0, 0, 6))
            assert (2, 6) in seen, "the two prompts of one length ran apart"
            return found

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools)


def test_a_rotary_boundary_is_not_crossed_in_a_pass(tools: Any) -> None:
    model = ARCHITECTURES["llama"]()
    # said in the config alone: the model has its frequencies already, so that its rows stay the same
    model.config.rope_parameters |= {"rope_type": "dynamic", "original_max_position_embeddings": 20}
    one = served(model)
    requests = [asked(length, draw, max_tokens=4) for draw, length in enumerate((6, 30, 14, 25))]

    async def run() -> list[Any]:
        async with one.engine(prefill_chunk=4) as engine:
            with pytest.raises(PromptError, match="past 20 positions"):
                engine.check(asked(18, 0, max_tokens=4))
            with tools.calls(model.get_input_embeddings()) as seen:
                found = await staggered(engine, requests, (0, 1, 0, 0))
            assert {shape for shape in seen if shape[1] > 4} == {(1, 30), (1, 25)}, "those past it run in one piece"
            assert (2, 1) in seen
            assert not {(3, 1), (4, 1)} & set(seen)
            return found

    for got, expected in zip(asyncio.run(run()), one.alone(requests), strict=True):
        same(got, expected, tools)


def test_stop_strings_end_where_they_end_alone(words: Any, tools: Any) -> None:
    one = served(ARCHITECTURES["gpt2"](), words)
    plain = [asked(length, seed, max_tokens=12) for seed, length in enumerate((4, 9, 6))]
    texts = [words.decode(list(completion.token_ids)).split() for completion, _ in one.alone(plain)]
    stops = [[f"{text[3]} {text[4]}", "nothing"] for text in texts]
    requests = [
        asked(length, seed, max_tokens=12, stop=stop, min_tokens=seed)
        for seed, (length, stop) in enumerate(zip((4, 9, 6), stops, strict=True))
    ]
    want = one.alone(requests)
    assert all(completion.finish_reason == "stop" for completion, _ in want)

    async def run() -> list[Any]:
        async with one.engine() as engine:
            return await staggered(engine, [*requests, *plain], [0, 2, 2, 1, 1, 1])

    for got, expected in zip(asyncio.run(run())[:3], want, strict=True):
        same(got, expected, tools)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_reference_after_its_prompt_is_generation(name: str, tools: Any) -> None:
    one = served(ARCHITECTURES[name]())
    prompt, reference = ids_of(3 * WINDOW, 1), ids_of(9, 2)
    gate = {"layers": [0, 1], "rule": {"kind": "per_layer", "threshold": -2.0, "compare": "ge"}}
    gate["readout"] = {"kind": "cosine", "d": vector(64, 3)}
    ops = [
        {"kind": "add", "layers": [0, 1, 2], "vector": vector(64, 4, 0.5), "gate": gate},
        {"kind": "ablate", "layers": [1], "directions": vector(64, 2), "scope": "generated"},
    ]
    spec = InterventionSpec.read(ops)
    request = ServedRequest(
        PreparedPrompt((*prompt, *reference)),
        GenerationParams(max_tokens=1, prompt_logprobs=0),
        CaptureSpec(layers=[2], select="prompt[-1], generated"),
        spec,
        prompt_len=len(prompt),
    )
    session = one.backend.open_session()
    want = session.score([ScoringItem(PreparedPrompt(prompt), reference, (InterventionEntry(spec),))])[0]
    session.close()

    async def run() -> list[Any]:
        async with one.engine(prefill_chunk=10) as engine:
            others = [asked(length, length, max_tokens=12) for length in (5, 30)]
            return await staggered(engine, [*others, request], (0, 2, 2))

    got = asyncio.run(run())[2]
    assert [found.logprob for found in got.ended.prompt_logprobs[-9:]] == pytest.approx(want.tolist(), abs=1e-4)
    assert got.ended.activations.position.tolist() == list(range(len(prompt) - 1, len(prompt) + 9))
    assert got.ended.activations.generated.tolist() == [False, *[True] * 9]
    assert {(op.op, op.layer): op.computed for op in got.ended.steering} == {
        (0, 0): 9,
        (0, 1): 9,
        (0, 2): 10,
        (1, 1): 9,
    }


@given(
    st.lists(st.tuples(st.integers(1, 3 * WINDOW), st.integers(1, 7), st.integers(0, 9)), min_size=1, max_size=7),
    st.sampled_from(["mistral", "gemma3_text"]),
    st.integers(1, 9),
    st.integers(1, 4),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_schedule(plan: list[tuple[int, int, int]], name: str, chunk: int, batch: int) -> None:
    one = KEPT.setdefault(name, served(ARCHITECTURES[name]()))
    spec = CaptureSpec(layers=[0, 2])
    requests = [asked(length, place, max_tokens=most, capture=spec) for place, (length, most, _) in enumerate(plan)]
    want = one.alone(requests)

    async def run() -> list[Any]:
        async with one.engine(prefill_chunk=chunk, max_batch=batch) as engine:
            return await staggered(engine, requests, [gap for *_, gap in plan])

    from parity.conftest import worst  # by its own name: fixtures are one for all examples

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, SimpleNamespace(worst=worst))


# --- the small real model


@pytest.mark.real_model
def test_smollm2_serves_what_it_gives_alone(smollm2_float32: Any, tools: Any) -> None:
    backend = HuggingFaceBackend.adopt(
        BackendSpec("huggingface", "smollm2"), lambda: smollm2_float32.session.model, lambda: smollm2_float32.tokenizer
    )
    one, tokenizer = Served(backend, {}), smollm2_float32.tokenizer
    texts = (
        "The capital of France is",
        "Once upon a time, in a land far away, there lived",
        "2 + 2 =",
        "Name a colour:",
    )
    prompts = [PreparedPrompt(tuple(tokenizer(text).input_ids)) for text in texts]
    add = InterventionSpec.read([{"kind": "add", "layers": [10], "vector": vector(576, 1, 3.0)}])
    params = [
        GenerationParams(max_tokens=12, logprobs=2, prompt_logprobs=1),
        GenerationParams(max_tokens=20, temperature=0.9, seed=11, stop=[" and"]),
        GenerationParams(
            max_tokens=10, constraint={"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        ),
        GenerationParams(max_tokens=8, constraint={"choice": ["red", "green", "blue"]}),
    ]
    spec = CaptureSpec(layers=[0, 15, 29], select="prompt[-1], generated")
    requests = [
        ServedRequest(prompt, of, spec if place % 2 else None, add if place == 1 else None)
        for place, (prompt, of) in enumerate(zip(prompts, params, strict=True))
    ]
    want = one.alone(requests)

    async def run() -> list[Any]:
        async with one.engine() as engine:
            assert "function" not in engine.capabilities.interventions.kinds
            assert engine.facts.model_type == "llama"
            return await staggered(engine, requests, (0, 2, 3, 3))

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools)
