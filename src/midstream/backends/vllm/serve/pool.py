"""Several servers of one model: where the next request goes, and what becomes of those of one that failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, Final, TypeVar

from midstream.core.errors import TransportError

from .transport import BrokenStreamError, Server

Result = TypeVar("Result")

_PREFIX: Final = 256
"""How many tokens of a prompt decide which server is asked first: one that has them in its cache."""
_SLACK: Final = 2
"""By how many requests a server may be busier than the idlest one, and still be asked for its cache."""
_REST: Final = 2.0
"""Seconds for which a server that failed is not asked whether it is well again."""


class Pool:
    """Servers in any number; each takes at most `at_a_time` of our requests."""

    def __init__(self, servers: Sequence[Server], at_a_time: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers = tuple(servers)
        self._at_a_time = at_a_time
        self._changed = asyncio.Condition()
        self._clock = clock
        self._failed: dict[Server, float] = {}

    async def ask(self, key: bytes, what: Callable[[Server], Awaitable[Result]]) -> Result:
        """What one server answers; where one fails, another is asked. TransportError: all have failed.

        key: requests with one key go to one server, as long as that is not busier than the others.
        """
        tried: set[Server] = set()
        while True:
            async with self.one(key, tried) as server:
                try:
                    return await what(server)
                except BrokenStreamError:  # some of it was passed on
                    raise
                except TransportError:
                    if len(self.servers) == 1:
                        raise
                    self._failed[server] = self._clock()
                    tried.add(server)
                    if len(tried) == len(self.servers):
                        raise

    @asynccontextmanager
    async def one(self, key: bytes, tried: set[Server] | None = None) -> AsyncIterator[Server]:
        """While open, one of a server's places is taken."""
        server = await self._taken(key, tried or set())
        try:
            yield server
        finally:
            async with self._changed:
                server.running -= 1
                self._changed.notify_all()

    async def _taken(self, key: bytes, tried: set[Server]) -> Server:
        left = [one for one in self.servers if one not in tried]
        await self._look_after(left)
        async with self._changed:
            while True:
                well = [one for one in left if one not in self._failed] or left  # else let one say why not
                if free := [one for one in well if one.running < self._at_a_time]:
                    break
                await self._changed.wait()
            idlest = min(one.running for one in free)
            found = max((one for one in free if one.running <= idlest + _SLACK), key=lambda one: _drawn(one, key))
            found.running += 1
            return found

    async def _look_after(self, servers: Sequence[Server]) -> None:
        """Ask those that failed a while ago whether they are well again; one request asks, the others go on."""
        none_well = all(one in self._failed for one in servers)
        for one in servers:
            if one in self._failed and (none_well or self._clock() - self._failed[one] > _REST):
                self._failed[one] = self._clock()
                if await one.is_well():
                    self._failed.pop(one, None)

    async def close(self) -> None:
        """Let go of all connections."""
        for server in self.servers:
            await server.close()


def _drawn(server: Server, key: bytes) -> bytes:
    """Rendezvous hashing: each key has an order of the servers, which others' coming and going does not change."""
    return sha256(server.base_url.encode() + b"\0" + key).digest()


def key_of(ids: Sequence[int], salt: Any) -> bytes:
    """What requests have in common that a server's cache has in common."""
    return sha256(repr((tuple(ids[:_PREFIX]), salt)).encode()).digest()
