"""Requests of an engine that serves, and all that it says of one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from midstream.backends.serving import Ended, Grown, ServedRequest, ServingEngine
from midstream.core.capture import CaptureSpec
from midstream.core.generation import GenerationParams, TokenLogprob
from midstream.core.interventions import InterventionSpec
from midstream.core.prompts import PreparedPrompt

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, 250, size=size).tolist() for size in (40, 7, 33, 64, 1, 20)]


@dataclass(frozen=True, eq=False)
class Said:
    """All that an engine said of one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    pieces: int
    end: Ended


async def heard(engine: ServingEngine, request: ServedRequest, begun: asyncio.Event | None = None) -> Said:
    """All that comes; begun: set when the first of it does."""
    grown: list[Grown] = []
    end: Ended | None = None
    async for piece in engine.run(request):
        assert end is None, "nothing follows the last word"
        if begun is not None:
            begun.set()
        if isinstance(piece, Ended):
            end = piece
        else:
            grown.append(piece)
    assert end is not None
    ids = tuple(token for one in grown for token in one.token_ids)
    return Said(ids, tuple(found for one in grown for found in one.logprobs or ()), len(grown), end)


def request(
    prompt: list[int],
    capture: CaptureSpec | None = None,
    steering: InterventionSpec | None = None,
    prompt_len: int | None = None,
    **given: Any,
) -> ServedRequest:
    params = GenerationParams(**{"max_tokens": 6, "ignore_eos": "constraint" not in given, **given})
    return ServedRequest(PreparedPrompt(tuple(prompt)), params, capture, steering, prompt_len)


def vector(seed: int) -> torch.Tensor:
    return torch.randn(128, generator=torch.Generator().manual_seed(seed))


async def waiting(engine: ServingEngine, *asked: ServedRequest) -> list[asyncio.Task[Said]]:
    """Requests, of which the first has begun."""
    begun = asyncio.Event()

    tasks = [asyncio.create_task(heard(engine, one, begun)) for one in asked]
    await begun.wait()
    return tasks


def too_many() -> list[ServedRequest]:
    """More long requests than a batch takes: some have not begun when the first ones end."""
    return [request(PROMPTS[0], CaptureSpec(layers=[1]), max_tokens=180) for _ in range(40)]
