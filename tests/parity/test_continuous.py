"""The embedded engine: each request gets what it gets alone, whatever else comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

import midstream as ms
from midstream.backends.huggingface.backend import HuggingFaceBackend
from midstream.backends.huggingface.continuous.batches import Batch, Prefill, prefills
from midstream.backends.huggingface.continuous.engine import EmbeddedEngine
from midstream.backends.huggingface.continuous.line import PASSED, Line, table_for
from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, CaptureError, EngineError, ModelLoadError, PromptError, SpecError
from midstream.core.generation import Completion, GenerationParams, TokenLogprob
from midstream.core.interventions import InterventionSpec
from midstream.core.items import GenerationItem, InterventionEntry, ScoringItem
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from parity.architectures import ARCHITECTURES, WINDOW

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")

#: Models that are refused: not causal, or no cache of keys and values alone.
REFUSED = {"t5", "gemma3n"}
UNDECODED = {"mamba", "qwen3_next"}
#: Models whose own float32 is further from itself in a batch than the bound.
ROUNDING = {"qwen3_next": 10.0, "gemma4_moe": 10.0}
EVERY = [name for name in ARCHITECTURES if name not in REFUSED | UNDECODED]


def ids_of(length: int, seed: int) -> tuple[int, ...]:
    return (1, *torch.randint(3, 140, (length - 1,), generator=torch.Generator().manual_seed(seed)).tolist())


def asked(
    length: int, draw: int, *, capture: CaptureSpec | None = None, steering: Any = None, **params: Any
) -> ServedRequest:
    """A request of a random prompt; it ignores EOS, which a tiny model may give at any time."""
    fields = {"max_tokens": 8, "ignore_eos": "constraint" not in params, **params}
    spec = None if steering is None else InterventionSpec.read(steering)
    return ServedRequest(PreparedPrompt(ids_of(length, draw)), GenerationParams(**fields), capture, spec)


@dataclass
class Got:
    """What one request gave. seen: what was said of others when each of its pieces came."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None


@dataclass
class Served:
    """A model, what each request gives alone, and an engine on it."""

    backend: HuggingFaceBackend
    options: dict[str, Any]

    def alone(self, requests: Sequence[ServedRequest]) -> list[tuple[Completion, CaptureResult | None]]:
        """What a session gives for each."""
        session = self.backend.open_session()
        try:
            return [self._alone(session, one) for one in requests]
        finally:
            session.close()

    @staticmethod
    def _alone(session: Any, one: ServedRequest) -> tuple[Completion, CaptureResult | None]:
        entries = () if one.steering is None else (InterventionEntry(one.steering),)
        item = GenerationItem(one.prompt, entries, (), one.params.seed)
        *_, last = session.stream(item, one.params.model_copy(update={"seed": None}), one.capture)
        return last.completion, last.capture

    @asynccontextmanager
    async def engine(self, **options: Any) -> AsyncIterator[EmbeddedEngine]:
        made = EmbeddedEngine(self.backend, **(self.options | options))
        await made.start()
        try:
            yield made
        finally:
            await made.close()


def served(model: Any, tokenizer: Any = None, **options: Any) -> Served:
    spec = BackendSpec("huggingface", type(model).__name__)
    return Served(HuggingFaceBackend.adopt(spec, lambda: model, lambda: tokenizer), options)


async def read(engine: EmbeddedEngine, request: ServedRequest, heard: Callable[[], None] = lambda: None) -> Got:
    got = Got()
    async for piece in engine.run(request):
        if isinstance(piece, Grown):
            got.token_ids += piece.token_ids
            got.logprobs += piece.logprobs or ()
        else:
            assert got.ended is None
            got.ended = piece
        heard()
    return got


async def staggered(engine: EmbeddedEngine, requests: Sequence[ServedRequest], gaps: Sequence[int]) -> list[Any]:
    """Each request begins when `gaps` more pieces have come, of whichever request; errors are given back."""
    heard, came = 0, asyncio.Event()

    def hear() -> None:
        nonlocal heard
        heard += 1
        came.set()

    tasks: list[asyncio.Task[Got]] = []
    for request, gap in zip(requests, gaps, strict=True):
        due = heard + gap
        while heard < due and any(not task.done() for task in tasks):
            came.clear()
            waiting = asyncio.create_task(came.wait())
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            tasks_left = [task for task in tasks if not task.done()]
            if not tasks_left:
                break
        tasks.append(asyncio.create_task(read(engine, request, hear)))
    return await asyncio.gather(*tasks, return_exceptions=True)


def same_logprobs(got: Sequence[TokenLogprob | None] | None, want: Sequence[TokenLogprob | None] | None) -> None:
    assert (got is None) == (want is None)
    for one, other in zip(got or (), want or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def same(got: Any, want: tuple[Completion, CaptureResult | None], tools: Any, bound: float = 1.0) -> None:
    """What came is what the request gives alone."""
    if isinstance(got, BaseException):
        raise got
    completion, capture = want
    assert tuple(got.token_ids) == completion.token_ids
    assert got.ended is not None
    assert got.ended.finish_reason == completion.finish_reason
    same_logprobs(got.logprobs if completion.logprobs is not None else None, completion.logprobs)
    same_logprobs(got.ended.prompt_logprobs, completion.prompt_logprobs)
    assert len(got.ended.steering) == len(completion.steering)
    for one, other in zip(got.ended.steering, completion.steering, strict=True):
        counts = (one.op, one.layer, one.selected, one.computed, one.skipped)
        assert counts == (other.op, other.layer, other.selected, other.computed, other.skipped)
        assert (one.relative or 0.0) == pytest.approx(other.relative or 0.0, rel=1e-3)
    assert (got.ended.activations is None) == (capture is None)
    if capture is None:
        return
    found = got.ended.activations
    labels = capture.labels
    assert found.position.tolist() == labels.position.tolist()
    assert found.token_id.tolist() == labels.token_id.tolist()
    assert found.generated.tolist() == labels.generated.tolist()
    assert found.receipt == completion.receipt
    rows = {
        (stack.site, layer): rows
        for stack in found.stacks
        for layer, rows in zip(stack.layers, stack.tensor, strict=True)
    }
    if len(labels.position):
        assert set(rows) == set(capture.tensors)
    for place, expected in capture.tensors.items():
        assert rows[place].dtype == expected.dtype
        assert not rows[place].is_inference()
        if expected.dtype == torch.float16:  # a last bit may fall the other way
            assert torch.allclose(rows[place], expected, rtol=2e-3, atol=1e-4), place
        elif expected.dtype.is_floating_point:
            assert tools.worst(rows[place], expected) <= bound, place


def vector(size: int, seed: int, scale: float = 1.0) -> list[float]:
    return (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32).tolist()


def mixed(hidden: int = 64, layers: int = 3) -> list[ServedRequest]:
    """Requests that have little in common."""
    add = {"kind": "add", "layers": [1], "vector": vector(hidden, 1, 0.5)}
    late = {"kind": "ablate", "layers": [0, 2], "directions": vector(hidden, 2), "scope": "generated"}
    cosine = {"kind": "cosine", "d": vector(hidden, 3)}
    gate = {"layers": [0], "rule": {"kind": "per_layer", "threshold": -2.0, "compare": "ge"}, "readout": cosine}
    gated = {"kind": "add", "layers": [1, 2], "vector": vector(hidden, 4, 0.5), "gate": gate}
    every = CaptureSpec(sites=("resid_post", "attn_out"))
    return [
        asked(5, 0, capture=every),
        asked(3 * WINDOW + 1, 1, max_tokens=12, logprobs=3),
        asked(WINDOW + 1, 2, steering=[add], capture=CaptureSpec(layers=[1, 2], select="prompt[-1], generated")),
        asked(1, 3, temperature=0.8, top_p=0.9, seed=5, max_tokens=15),
        asked(2 * WINDOW, 4, steering=[add, late], seed=3, temperature=1.5, top_k=20, logprobs=0),
        asked(4, 5, prompt_logprobs=2, capture=CaptureSpec(layers=[0], select="prompt", dtype="float16")),
        asked(2 * WINDOW + 3, 6, repetition_penalty=1.6, capture=every, max_tokens=1),
        asked(11, 7, steering=[gated], capture=CaptureSpec(layers=[2], select="generated[0:2]")),
        asked(WINDOW - 1, 8, min_tokens=4, stop_token_ids=list(range(3, 120)), max_tokens=9),
        asked(9, 9, capture=CaptureSpec(layers=[layers - 1], select="prompt[99]")),
        asked(30, 10, prompt_logprobs=0, logprobs=1, steering=[late], max_tokens=5),
    ]


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


def nothing_is_held(engine: EmbeddedEngine) -> None:
    worker: Any = engine._ready.worker
    done = Event()
    worker._inbox.put(done.set)
    assert done.wait(10), "the worker does not listen"
    assert engine.counts == (0, 0)
    watch = worker._watch
    assert not watch._reserved
    assert watch._segments.nbytes == 0
    assert not worker._batches
    assert not worker._prefills


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
    monkeypatch.setattr("midstream.backends.huggingface.continuous.worker._MOMENT", 0.2)
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


@contextmanager
def patched(holder: Any, **changes: Any) -> Iterator[None]:
    before = {name: getattr(holder, name) for name in changes}
    for name, value in changes.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def test_a_rotary_boundary_is_not_crossed_in_a_pass(tools: Any) -> None:
    model = ARCHITECTURES["llama"]()
    model.config.rope_parameters["rope_type"] = "dynamic"  # said alone: the frequencies stay, so that rows compare
    model.config.max_position_embeddings = 20
    one = served(model)
    with patched(model.config, max_position_embeddings=20):
        requests = [asked(length, seed, max_tokens=4) for seed, length in enumerate((6, 14, 5))]

        async def run() -> list[Any]:
            async with one.engine(prefill_chunk=4) as engine:
                with pytest.raises(PromptError, match="context has 20"):
                    engine.check(asked(18, 0, max_tokens=4))
                return await staggered(engine, requests, (0, 1, 1))

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


KEPT: dict[str, Served] = {}


# --- room, turns, and ends


def test_a_short_request_ends_while_a_long_prompt_is_read() -> None:
    one = served(ARCHITECTURES["gpt2"]())
    order: list[str] = []

    async def run() -> None:
        async with one.engine(prefill_chunk=4) as engine:
            long = asyncio.create_task(read(engine, asked(200, 0, max_tokens=2), lambda: order.append("long")))
            while engine.counts != (1, 0):
                await asyncio.sleep(0)
            await read(engine, asked(6, 1, max_tokens=4), lambda: order.append("short"))
            order.append("short has ended")
            await long

    asyncio.run(run())
    assert order.index("short has ended") < order.index("long")


def test_captures_wait_for_room_and_small_ones_pass(tools: Any) -> None:
    one = served(ARCHITECTURES["gpt2"]())
    large, small = CaptureSpec(), CaptureSpec(layers=[0], select="prompt[-1]")
    requests = [asked(40, 0, capture=large), asked(40, 1, capture=large), asked(5, 2, capture=small), asked(5, 3)]
    room = 47 * 3 * 64 * 4 + 64 * 4
    want = one.alone(requests)
    ends: list[int] = []

    async def numbered(engine: EmbeddedEngine, place: int) -> Got:
        got = await read(engine, requests[place])
        ends.append(place)
        return got

    async def run() -> list[Got]:
        async with one.engine(row_bytes=room) as engine:
            with pytest.raises(SpecError, match="capture"):
                engine.check(asked(41, 0, capture=large, max_tokens=9))
            tasks = [asyncio.create_task(numbered(engine, place)) for place in range(4)]
            seen: set[tuple[int, int]] = set()
            while not all(task.done() for task in tasks):
                seen.add(engine.counts)
                await asyncio.sleep(0)
            assert (3, 1) in seen
            assert not any(running == 4 for running, _ in seen)
            nothing_is_held(engine)
            return [task.result() for task in tasks]

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools)
    assert ends[-1] == 1


def test_rows_that_nobody_reads_hold_others_up_until_they_are_given_up(tools: Any) -> None:
    one = served(ARCHITECTURES["gpt2"]())
    request = asked(20, 0, capture=CaptureSpec())
    (want,) = one.alone([request])

    async def run() -> Got:
        async with one.engine(row_bytes=27 * 3 * 64 * 4) as engine:
            slow = engine.run(request)
            await anext(slow)  # and reads no further
            waiting = asyncio.create_task(read(engine, request))
            await asyncio.sleep(0.3)
            assert engine.counts == (0, 1)
            await slow.aclose()
            return await waiting

    same(asyncio.run(run()), want, tools)


def test_the_cache_has_room_for_what_runs_and_long_ones_sit_apart(tools: Any) -> None:
    model = ARCHITECTURES["gpt2"]()
    one = served(model)
    requests = [asked(length, place) for place, length in enumerate((60, 10, 10, 10, 5, 10))]
    want = one.alone(requests)
    width = 67

    async def run() -> list[Any]:
        async with one.engine(max_tokens_in_batch=width + 4 * 17) as engine:
            with pytest.raises(PromptError, match="max_tokens_in_batch"):
                engine.check(asked(130, 0, max_tokens=8))
            tasks = [asyncio.create_task(read(engine, request)) for request in requests]
            seen: set[tuple[int, int]] = set()
            while not all(task.done() for task in tasks):
                seen.add(engine.counts)
                await asyncio.sleep(0)
            assert (5, 1) in seen
            assert not any(running == 6 for running, _ in seen)
            return [task.result() for task in tasks]

    with tools.calls(model.get_input_embeddings()) as calls:
        for got, expected in zip(asyncio.run(run()), want, strict=True):
            same(got, expected, tools)
    assert (4, 1) in calls


def test_whoever_goes_leaves_the_others_right(tools: Any) -> None:
    one = served(ARCHITECTURES["mistral"]())
    every = CaptureSpec()
    add = [{"kind": "add", "layers": [1], "vector": vector(64, 1)}]
    stays = [asked(12, 0, capture=every, max_tokens=20), asked(3, 1, max_tokens=20, steering=add)]
    goes = [asked(30, 2, capture=every, max_tokens=100, steering=add), asked(9, 3, max_tokens=100), asked(90, 4)]
    want = one.alone(stays)

    async def some(engine: EmbeddedEngine, request: ServedRequest, pieces: int) -> None:
        running = engine.run(request)
        for _ in range(pieces):
            await anext(running)
        await running.aclose()

    async def run() -> list[Got]:
        async with one.engine(prefill_chunk=8, max_batch=4) as engine:
            staying = [asyncio.create_task(read(engine, request)) for request in stays]
            await asyncio.gather(some(engine, goes[0], 3), some(engine, goes[1], 7))
            reading = asyncio.create_task(read(engine, goes[2]))  # gone while its prompt runs
            await asyncio.sleep(0.005)
            reading.cancel()
            found = [await task for task in staying]
            await read(engine, asked(2, 5, max_tokens=1))
            nothing_is_held(engine)
            return found

    for got, expected in zip(asyncio.run(run()), want, strict=True):
        same(got, expected, tools)


def test_a_line_lets_small_ones_pass_but_not_for_ever() -> None:
    line = Line[int](lambda size: ("place", "rows") if size > 10 else ("place",))

    def few(size: int) -> str | None:
        return "place" if size > 90 else None

    def full(size: int) -> str | None:
        return "rows" if size > 10 else None

    line.add(100)
    for _ in range(PASSED + 5):
        line.add(1)
    passed = 0
    while line.take(few) is not None:
        passed += 1
    assert passed == PASSED
    assert line.take(full) == 1, "it wants nothing that the first lacks"
    line.add(20)
    assert [line.take(lambda size: "rows" if size > 90 else None) for _ in range(5)] == [1, 1, 1, 1, None]
    assert line.take(lambda _: None) == 100
    assert line.take(few) == 20
    assert not len(line)


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=40), st.integers(1, 100))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tables_hold_no_more_than_there_is(moves: list[tuple[int, bool]], most: int) -> None:
    tables: dict[int, list[int]] = {}
    for reach, goes in moves:
        sizes = {number: (len(of), max(of)) for number, of in tables.items()}
        table = table_for(sizes, reach, most)
        if table is not None:
            tables.setdefault(table, []).append(reach)
        else:
            assert sum(count * longest for count, longest in sizes.values()) + reach > most
        assert sum(len(of) * max(of) for of in tables.values()) <= most
        if goes and tables:
            first = next(iter(tables))
            tables[first].pop()
            tables = {number: of for number, of in tables.items() if of}


# --- faults


def test_a_fault_of_a_pass_fails_those_who_share_it(tools: Any) -> None:
    model = ARCHITECTURES["gpt2"]()
    one = served(model)
    cursed = ServedRequest(PreparedPrompt((1, 150, 3)), GenerationParams(max_tokens=5), CaptureSpec())
    requests = [asked(6, 0, max_tokens=20, capture=CaptureSpec()), asked(8, 1, max_tokens=20)]
    want = one.alone(requests)
    broken = False

    def fail(_: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"]
        if broken or (ids == 150).any():
            raise RuntimeError("the device is on fire\nand more")

    async def run() -> None:
        nonlocal broken
        async with one.engine() as engine:
            running = [asyncio.create_task(read(engine, request)) for request in requests]
            await asyncio.sleep(0.01)
            with pytest.raises(EngineError, match="on fire"):
                await read(engine, cursed)
            for task, expected in zip(running, want, strict=True):
                same(await task, expected, tools)
            running = [asyncio.create_task(read(engine, asked(6, 0, max_tokens=200))) for _ in range(3)]
            await asyncio.sleep(0.05)
            broken = True
            found = await asyncio.gather(*running, return_exceptions=True)
            assert [type(error) for error in found] == [EngineError] * 3
            tools.one_line(str(found[0]), "on fire")
            broken = False
            for got, expected in zip(await staggered(engine, requests, (0, 1)), want, strict=True):
                same(got, expected, tools)
            nothing_is_held(engine)

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        asyncio.run(run())
    finally:
        handle.remove()


def test_memory_that_runs_out_fails_one_pass(tools: Any) -> None:
    model = ARCHITECTURES["gpt2"]()
    one, times = served(model), iter([True])
    request = asked(6, 0)
    (want,) = one.alone([request])

    def fail(*_: Any) -> None:
        if next(times, False):
            raise torch.OutOfMemoryError("tried to allocate everything")

    async def run() -> None:
        async with one.engine() as engine:
            handle = model.register_forward_pre_hook(fail)
            with pytest.raises(EngineError, match="allocate"):
                await read(engine, request)
            handle.remove()
            same(await read(engine, request), want, tools)
            assert engine.well

    asyncio.run(run())


def test_a_request_that_cannot_be_drawn_or_stored_fails_alone(tools: Any) -> None:
    one = served(ARCHITECTURES["llama"]())
    far = [{"kind": "add", "layers": [0], "vector": vector(64, 1), "strength": 3e38}]
    bad = [
        asked(5, 0, steering=far, temperature=1.0, seed=1),
        asked(5, 1, steering=far, capture=CaptureSpec(dtype="int32", layers=[1])),
    ]
    good = [asked(7, 2, temperature=1.0, seed=1, steering=None), asked(9, 3, capture=CaptureSpec(dtype="int64"))]
    want = one.alone(good)

    async def run() -> list[Any]:
        async with one.engine() as engine:
            found = await staggered(engine, [*bad, *good], (0, 0, 0, 0))
            nothing_is_held(engine)
            return found

    found = asyncio.run(run())
    assert [type(error) for error in found[:2]] == [EngineError, CaptureError]
    tools.one_line(str(found[0]), "not finite")
    for got, expected in zip(found[2:], want, strict=True):
        same(got, expected, tools)


def test_a_tap_that_fails_fails_those_who_have_taps_in_its_pass(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(ARCHITECTURES["llama"]())
    requests = [asked(6, 0, capture=CaptureSpec()), asked(6, 1)]
    want = one.alone(requests)

    def fail(*_: Any) -> None:
        raise RuntimeError("no tape")

    async def run() -> list[Any]:
        async with one.engine() as engine:
            with monkeypatch.context() as patch:
                patch.setattr("midstream.taps.tape.Tape.record", fail)
                found = await staggered(engine, requests, (0, 0))
            same(await read(engine, requests[0]), want[0], tools)
            nothing_is_held(engine)
            return found

    found = asyncio.run(run())
    assert isinstance(found[0], CaptureError)
    tools.one_line(str(found[0]), "no tape")
    same(found[1], want[1], tools)


def test_rows_that_did_not_come_are_an_error_of_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    one = served(ARCHITECTURES["llama"]())

    async def run() -> list[Any]:
        async with one.engine() as engine:
            tape: Any = engine._ready.worker._watch._tape
            monkeypatch.setattr(
                tape, "begin", lambda step, device, begin=tape.begin: begin(step.take(step.position != 7), device)
            )
            found = await staggered(engine, [asked(6, 0, capture=CaptureSpec()), asked(6, 1)], (0, 0))
            nothing_is_held(engine)
            return found

    found = asyncio.run(run())
    assert isinstance(found[0], CaptureError)
    assert "13 rows were selected, and 12 came" in str(found[0])
    assert len(found[1].token_ids) == 8


# --- its life, and what is refused


def test_the_model_is_in_use_while_the_engine_runs() -> None:
    one = served(ARCHITECTURES["llama"]())

    async def run() -> None:
        engine = EmbeddedEngine(one.backend)
        with pytest.raises(EngineError, match="not started"):
            _ = engine.facts
        assert not engine.well
        assert engine.counts == (0, 0)
        await engine.start()
        with pytest.raises(BusyError):
            one.backend.open_session()
        assert engine.well
        running = asyncio.create_task(read(engine, asked(5, 0, max_tokens=240)))
        while engine.counts != (1, 0):
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        assert not engine.well
        with pytest.raises(EngineError):
            await read(engine, asked(5, 0))
        await engine.close()

    asyncio.run(run())
    one.backend.open_session().close()


def test_what_cannot_be_decoded_is_refused_at_the_start(tools: Any) -> None:
    one = served(ARCHITECTURES["mamba"]())

    async def run() -> None:
        await EmbeddedEngine(one.backend).start()

    with pytest.raises(ModelLoadError) as caught:
        asyncio.run(run())
    tools.one_line(str(caught.value), "mamba", "cannot be decoded")
    one.backend.open_session().close()


WRONG: dict[str, tuple[ServedRequest, type[Exception], str]] = {
    "an id past the vocabulary": (
        ServedRequest(PreparedPrompt((1, 160)), GenerationParams()), PromptError, "token id 160"),
    "more than the context": (asked(250, 0, max_tokens=9), PromptError, "context has 256"),
    "no such layer": (asked(3, 0, capture=CaptureSpec(layers=[3])), SpecError, "E_LAYER_RANGE at capture.layers"),
    "no such site": (asked(3, 0, capture=CaptureSpec(sites=("router_logits",))), SpecError, "E_SITE at capture.sites"),
    "no such layer to steer": (
        asked(3, 0, steering=[{"kind": "add", "layers": [9], "vector": [1.0] * 64}]),
        SpecError, "E_LAYER_RANGE at steering.ops[0].layers"),
    "a wrong width": (
        asked(3, 0, steering=[{"kind": "add", "layers": [1], "vector": [1.0] * 63}]), SpecError, "steering.ops[0]"),
    "a function": (
        asked(3, 0, steering=ms.function(lambda rows, labels: None, layers=[1])),
        SpecError, "E_UNKNOWN_KIND at steering.ops[0].kind"),
    "a prompt_len past the prompt": (
        ServedRequest(PreparedPrompt((1, 2)), GenerationParams(), prompt_len=3),
        SpecError, "E_BAD_PARAM at prompt_len"),
    "n": (asked(3, 0, n=2), SpecError, "E_UNKNOWN_KIND at generation.n"),
    "extra": (asked(3, 0, extra={"num_beams": 2}), SpecError, "E_UNKNOWN_KIND at generation.extra"),
    "stop strings without a tokenizer": (asked(3, 0, stop="end"), SpecError, "generation.stop"),
    "a constraint without a tokenizer": (asked(3, 0, constraint={"regex": "a"}), SpecError, "generation.constraint"),
    "an image": (
        ServedRequest(PreparedPrompt((1, 2), multi_modal_data={"pixel_values": torch.ones(1)}), GenerationParams()),
        PromptError, "multi_modal_data"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_refused_before_it_runs(what: str, tools: Any) -> None:
    request, kind, said = WRONG[what]
    one = KEPT.setdefault("gpt2", served(ARCHITECTURES["gpt2"]()))

    async def run() -> tuple[Exception, Exception]:
        async with one.engine() as engine:
            with pytest.raises(kind) as first:
                await asyncio.to_thread(engine.check, request)
            with pytest.raises(kind) as second:
                await read(engine, request)
            return first.value, second.value

    for error in asyncio.run(run()):
        tools.one_line(str(error), said)


def test_options_are_checked() -> None:
    with pytest.raises(SpecError, match="max_batch"):
        EmbeddedEngine(BackendSpec("huggingface", "smollm2"), max_batch=0)


def test_hooks_are_there_for_passes_that_want_them_alone(tools: Any) -> None:
    model = ARCHITECTURES["llama"]()
    one = served(model)
    seen: list[tuple[int, int]] = []
    request = asked(6, 0, capture=CaptureSpec(layers=[0, 2], select="prompt"))

    def count(_: Any, args: Any, kwargs: Any) -> None:
        seen.append((kwargs["input_ids"].shape[1], tools.hook_count(model) - 1))

    async def run() -> None:
        async with one.engine() as engine:
            handle = model.register_forward_pre_hook(count, with_kwargs=True)
            await read(engine, request)
            handle.remove()

    asyncio.run(run())
    assert seen == [(6, 2), *[(1, 0)] * 7]


# --- caches that come together and part


class Naive:
    """Rows of numbers, as they are: what every layer must hold the end of."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows


WINDOWS = (None, 3, 6)


def new_layers() -> Cache:
    return Cache(layers=[DynamicLayer() if of is None else DynamicSlidingWindowLayer(of) for of in WINDOWS])


def put(cache: Cache, values: torch.Tensor) -> None:
    """More columns `[rows, columns]`, to every layer."""
    for layer in range(len(WINDOWS)):
        cache.update(values[:, None, :, None].float(), -values[:, None, :, None].float(), layer)


def row(prompt: list[int]) -> Any:
    params = GenerationParams(max_tokens=99)
    return SimpleNamespace(
        request=0,
        prompt=prompt,
        prompt_len=len(prompt),
        token_ids=[],
        tapped=False,
        gated=False,
        table=0,
        stopping=SimpleNamespace(params=params),
    )


def prefilled(prompts: list[list[int]], chunk: int) -> Batch:
    prefill = Prefill([row(prompt) for prompt in prompts], chunk if len(prompts) == 1 else 99, new_layers())
    while not prefill.ended:
        step = prefill.next()
        assert step.ids.shape[1] <= prefill.chunk
        put(prefill.cache, step.ids)
    return prefill.batch()


def check(batch: Batch, sequences: list[list[int]]) -> None:
    width = max(map(len, sequences), default=0)
    assert batch.mask.shape == (len(sequences), batch.columns)
    for place, sequence in enumerate(sequences):
        assert batch.mask[place].tolist() == [0] * (batch.columns - len(sequence)) + [1] * len(sequence)
    for layer, window in zip(batch.cache.layers, WINDOWS, strict=True):
        held = batch.columns if window is None else min(batch.columns, window - 1)
        assert layer.keys.shape == (len(sequences), 1, held, 1)
        assert layer.get_seq_length() == batch.columns
        for place, sequence in enumerate(sequences):
            tail = sequence[-held:] if held else []
            assert layer.keys[place, 0, held - len(tail) :, 0].tolist() == tail
            assert layer.values[place, 0, held - len(tail) :, 0].tolist() == [-token for token in tail]
    assert batch.columns >= width


PROMPTS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("join"), PROMPTS, st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("leave"), st.lists(st.booleans(), min_size=12, max_size=12), st.just(0)),
    ),
    max_size=12,
)


@given(PROMPTS, MOVES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_caches_hold_the_ends_of_their_rows(first: list[int], moves: list[tuple[str, Any, int]]) -> None:
    numbers = iter(range(1, 10_000))

    def prompts_of(lengths: list[int]) -> list[list[int]]:
        return [[next(numbers) for _ in range(length)] for length in lengths]

    sequences = prompts_of(first)
    batch = prefilled([list(one) for one in sequences], 3)
    check(batch, sequences)
    for kind, what, chunk in moves:
        if kind == "join":
            more = prompts_of(what)
            batch.join(prefilled([list(one) for one in more], chunk))
            sequences = [*sequences, *more]
        elif kind == "step":
            for _ in range(what):
                for one, sequence in zip(batch.rows, sequences, strict=True):
                    one.token_ids = [next(numbers)]
                    sequence.append(one.token_ids[0])
                put(batch.cache, batch.next().ids)
        else:
            stays = [*what, *[True] * len(sequences)][: len(sequences)]
            if not any(stays):
                continue
            for one, stay in zip(batch.rows, stays, strict=True):
                one.stays = stay
            batch.keep(lambda one: one.stays)
            sequences = [sequence for sequence, stay in zip(sequences, stays, strict=True) if stay]
            if not all(stays):
                assert batch.columns == max(map(len, sequences))
        check(batch, sequences)


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 100), st.integers(1, 50), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_prompts_run_together_under_the_budget(lengths: list[int], budget: int, chunk: int, padded: bool) -> None:
    rows = [row(list(range(length))) for length in lengths]
    found = prefills(rows, budget, chunk, padded, lambda one: False)
    assert sorted(id(one) for prefill in found for one in prefill.rows) == sorted(map(id, rows))
    for prefill in found:
        sizes = [len(one.prompt) for one in prefill.rows]
        if len(sizes) > 1:
            assert len(sizes) * max(sizes) <= budget
            assert max(sizes) <= chunk
            assert padded or len(set(sizes)) == 1


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
