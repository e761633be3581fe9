"""Tensors that wait in memory for whoever was given their handles: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from midstream.core.errors import CaptureError

from .wire import tensor_bytes, tensor_frame

_PIECE: Final = 1 << 20
_PATIENCE: Final = 1.0
"""Seconds between looks, where nothing that is held tells when it goes."""


@dataclass(eq=False)
class _Held:
    """One tensor. until: when it goes. fetched: whether it was sent whole, so that it may go before."""

    tensor: Tensor
    until: float
    fetched: bool = False


class Held:
    """At most `max_bytes` of tensors, `seconds` each; what does not fit waits for others to go.

    Room is taken before a tensor is made, and given up or filled by it.

    >>> import torch
    >>> async def kept():
    ...     held = Held(max_bytes=100, seconds=60)
    ...     await held.take(12)
    ...     (handle,) = await held.keep([torch.zeros(3)], 12)
    ...     return held.get(handle), held.get("another")
    >>> asyncio.run(kept())
    (tensor([0., 0., 0.]), None)
    """

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self.seconds = max_bytes, seconds
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._taken = 0
        self._gone = asyncio.Condition()

    @property
    def nbytes(self) -> int:
        """What they take, and what is taken for others."""
        return self._taken + sum(one.tensor.nbytes for one in self._held.values())

    async def take(self, nbytes: int) -> None:
        """Wait until there is room for so many bytes, and take it; CaptureError: there never will be."""
        if nbytes > self.max_bytes:
            raise CaptureError(
                f"{nbytes:,} bytes of activations, and this server holds {self.max_bytes:,}: fewer rows or layers"
            )
        async with self._gone:
            while not self._room_for(nbytes):
                ends = [one.until - self._clock() for one in self._held.values()]
                try:
                    await asyncio.wait_for(self._gone.wait(), max(min(ends, default=_PATIENCE), 0.01))
                except TimeoutError:
                    continue  # one of them has gone by now
            self._taken += nbytes

    async def give_up(self, nbytes: int) -> None:
        """Room that was taken is not wanted any more."""
        self._taken -= nbytes
        await self._tell()

    async def keep(self, tensors: Sequence[Tensor], taken: int) -> list[str]:
        """A handle for each of some tensors, for which room was taken."""
        until = self._clock() + self.seconds
        handles = [secrets.token_urlsafe(24) for _ in tensors]
        self._held |= {name: _Held(one, until) for name, one in zip(handles, tensors, strict=True)}
        await self.give_up(taken)
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

    async def sent(self, handle: str, compression: str) -> tuple[int, AsyncIterator[bytes]] | None:
        """How many bytes a handle's tensor has, and the bytes; None: there is none, or it has gone.

        compression: zstd, one frame; or none. Once all were taken it counts as fetched.
        """
        if (tensor := self.get(handle)) is None:
            return None
        data = tensor_bytes(tensor) if compression == "none" else await asyncio.to_thread(tensor_frame, tensor)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), _PIECE):
                yield bytes(data[start : start + _PIECE])
            await self.fetched(handle)

        return len(data), pieces()

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
