"""Tensors that wait in memory for whoever was given their handles: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from midstream.core.errors import CaptureError


@dataclass(eq=False)
class _Held:
    """One tensor. until: when it goes. fetched: whether it was sent whole, so that it may go before."""

    tensor: Tensor
    until: float
    fetched: bool = False


class Held:
    """At most `max_bytes` of tensors, `seconds` each; what does not fit waits for others to go.

    >>> import torch
    >>> async def kept():
    ...     held = Held(max_bytes=100, seconds=60)
    ...     (handle,) = await held.put([torch.zeros(3)])
    ...     return held.get(handle), held.get("another")
    >>> asyncio.run(kept())
    (tensor([0., 0., 0.]), None)
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.seconds = max_bytes, seconds
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._gone = asyncio.Condition()

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(one.tensor.nbytes for one in self._held.values())

    async def put(self, tensors: Sequence[Tensor]) -> list[str]:
        """A handle for each of some tensors, which are kept together or not at all; CaptureError: they never fit."""
        needed = sum(one.nbytes for one in tensors)
        if needed > self.max_bytes:
            raise CaptureError(
                f"{needed:,} bytes of activations, and this server holds {self.max_bytes:,}: fewer rows or layers"
            )
        async with self._gone:
            while not self._room_for(needed):
                wait = min(one.until for one in self._held.values()) - self._clock()
                try:
                    await asyncio.wait_for(self._gone.wait(), max(wait, 0.01))
                except TimeoutError:
                    continue  # one of them has gone by now
            handles = [secrets.token_urlsafe(24) for _ in tensors]
            until = self._clock() + self.seconds
            self._held |= {name: _Held(one, until) for name, one in zip(handles, tensors, strict=True)}
        return handles

    def get(self, handle: str) -> Tensor | None:
        """The tensor of a handle; None: there is none, or it has gone."""
        self._forget_late()
        found = self._held.get(handle)
        return None if found is None else found.tensor

    async def fetched(self, handle: str) -> None:
        """It was sent whole: it may go when room is needed."""
        if (found := self._held.get(handle)) is not None:
            found.fetched = True
            await self._tell()

    async def drop(self, handle: str) -> bool:
        """Let it go. Whether it was there."""
        known = self._held.pop(handle, None) is not None
        await self._tell()
        return known

    async def _tell(self) -> None:
        async with self._gone:
            self._gone.notify_all()

    def _room_for(self, needed: int) -> bool:
        self._forget_late()
        for name in [name for name, one in self._held.items() if one.fetched]:
            if self.nbytes + needed <= self.max_bytes:
                break
            del self._held[name]
        return self.nbytes + needed <= self.max_bytes

    def _forget_late(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._held.items() if one.until <= now]:
            del self._held[name]
