"""Tensors that wait for whoever has their handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from midstream.core.errors import CaptureError
from midstream.formats.held import Held


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def running(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))  # pyright: ignore[reportArgumentType]

    run.__name__ = test.__name__
    return run


ROW = torch.ones(10)


async def put(held: Held, *tensors: torch.Tensor) -> list[str]:
    needed = sum(one.nbytes for one in tensors)
    await held.take(needed)
    return await held.keep(tensors, needed)


@running
async def test_what_never_fits_is_refused_and_what_does_not_fit_now_waits() -> None:
    held = Held(100, 60)
    with pytest.raises(CaptureError, match="120 bytes of activations, and this server holds 100"):
        await put(held, torch.ones(30))
    first = await put(held, ROW, ROW)
    waiting = asyncio.create_task(put(held, ROW))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert await held.drop(first[0])
    (second,) = await waiting
    assert held.get(first[0]) is None
    assert held.get(second) is ROW
    assert held.nbytes == 80
    assert not await held.drop("unknown")


@running
async def test_what_is_too_old_goes() -> None:
    clock = Clock()
    held = Held(100, 60, clock)
    (one,) = await put(held, ROW)
    clock.now = 59
    assert held.get(one) is ROW
    clock.now = 60
    assert held.get(one) is None
    assert held.nbytes == 0


@running
async def test_waiting_ends_when_the_oldest_goes() -> None:
    held = Held(40, 0.1)
    await put(held, ROW)
    await put(held, ROW)
    assert held.nbytes == 40


@running
async def test_what_was_fetched_goes_first_and_only_when_room_is_needed() -> None:
    held = Held(100, 60)
    kept, fetched = await put(held, ROW, ROW)
    await held.fetched(fetched)
    assert held.get(fetched) is ROW
    await put(held, ROW)
    assert held.get(fetched) is None
    assert held.get(kept) is ROW


@running
async def test_many_at_once_never_hold_more() -> None:
    held, most = Held(200, 60), 0

    async def one() -> None:
        nonlocal most
        handles = await put(held, ROW, ROW)
        most = max(most, held.nbytes)
        await asyncio.sleep(0.001)
        for handle in handles:
            await held.drop(handle)

    await asyncio.gather(*(one() for _ in range(50)))
    assert 0 < most <= 200
    assert held.nbytes == 0


@running
async def test_room_that_was_taken_and_not_filled_is_given_up() -> None:
    held = Held(100, 60)
    await held.take(90)
    waiting = asyncio.create_task(put(held, ROW))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await held.give_up(90)
    await waiting
    assert held.nbytes == 40
