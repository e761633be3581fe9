"""An embedded engine, requests to it, and what each of them gives alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from midstream.backends.huggingface.backend import HuggingFaceBackend
from midstream.backends.huggingface.continuous.engine import EmbeddedEngine
from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.backend import BackendSpec
from midstream.core.capture import CaptureSpec
from midstream.core.generation import Completion, GenerationParams, TokenLogprob
from midstream.core.interventions import InterventionSpec
from midstream.core.items import GenerationItem, InterventionEntry
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from parity.architectures import WINDOW


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
    """What one request gave."""

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
        while heard < due and not all(task.done() for task in tasks):
            came.clear()
            waiting = asyncio.create_task(came.wait())
            left = [task for task in tasks if not task.done()]
            await asyncio.wait([waiting, *left], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
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


KEPT: dict[str, Served] = {}
"""Models that no test changes, by name."""
