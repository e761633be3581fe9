"""The embedded engine: who waits, who goes, what fails, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import midstream as ms
from midstream.backends.huggingface.continuous.engine import EmbeddedEngine
from midstream.backends.serving import ServedRequest
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, CaptureError, EngineError, ModelLoadError, PromptError, SpecError
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from parity.architectures import ARCHITECTURES
from parity.continuous_kit import (
    KEPT,
    Got,
    asked,
    nothing_is_held,
    read,
    same,
    served,
    staggered,
    vector,
)

pytestmark = pytest.mark.filterwarnings("ignore:no row was selected")


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
