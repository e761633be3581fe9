"""Rows that were captured before, kept where the workers put them, and given again for a prompt that begins alike.

An engine's prefix cache spares the computation of a prefix; a capture that wants its rows could not use it. Here the
rows of whole blocks are found by the key of the block, so that only what follows must be computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from midstream.core.capture import CaptureSpec
from midstream.core.select import resolve
from midstream.taps.step import Ints, whole_sequence

from .block_keys import chain
from .jobs import Job
from .rows import Collected

ROWS_KEPT: Final = 256 << 20
"""Bytes of segments whose rows are kept for reuse, unless the caller says otherwise; 0 keeps none."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """What of one prompt's rows is there already: positions before `first`, from requests by block.

    blocks: (key, first position) of each block of which rows are wanted.
    """

    first: int
    blocks: Sequence[tuple[str, int]]
    keys: Sequence[str]
    whole: Sequence[bool]


@dataclass(eq=False)
class _Kept:
    """The rows of one request, which its worker holds for us. parts: of every rank; segments: what that holds there."""

    parts: Sequence[Collected]
    segments: Mapping[tuple[int, int], int]
    keys: list[str] = field(default_factory=list[str])


class RowStore:
    """Blocks of captured rows, of at most `max_bytes` together; the oldest request's go first."""

    def __init__(self, block_size: int, max_bytes: int = ROWS_KEPT) -> None:
        self.block_size, self.max_bytes = block_size, max_bytes
        self._kept: dict[str, _Kept] = {}
        self._where: dict[str, tuple[str, int]] = {}  # key of a block → request, first position
        self._promised: dict[str, str] = {}  # the same of requests that are under way in this call

    def look_up(self, job: Job, spec: CaptureSpec) -> Lookup:
        """What is there, or will be, of the rows that a capture wants of a job's prompt."""
        ids, size = job.prompt.token_ids, self.block_size
        wanted = resolve(spec.select, whole_sequence(ids, len(ids)))
        if not self.max_bytes or not wanted[: len(ids) // size * size].any():
            return Lookup(0, (), (), ())
        keys = [self._signed(key, spec) for key in chain(ids, len(ids), size, job.spec, job.salt)]
        whole = [bool(wanted[place * size : (place + 1) * size].all()) for place in range(len(keys))]
        blocks: list[tuple[str, int]] = []
        first = 0
        for place, key in enumerate(keys):
            if wanted[place * size : (place + 1) * size].any():
                if key not in self._where and key not in self._promised:
                    break
                blocks.append((key, place * size))
            first = (place + 1) * size
        return Lookup(first if blocks else 0, blocks, keys, whole)

    def promise(self, request: str, lookup: Lookup) -> None:
        """A request is under way that will have whole blocks of rows past `first`."""
        for place, key in enumerate(lookup.keys):
            if lookup.whole[place] and place * self.block_size >= lookup.first and key not in self._where:
                self._promised.setdefault(key, request)

    def provider(self, key: str) -> str:
        """The request that has a block's rows, or will have them."""
        return self._where[key][0] if key in self._where else self._promised[key]

    def has(self, key: str) -> bool:
        """Whether a block's rows are there."""
        return key in self._where

    def keep(self, request: str, lookup: Lookup, parts: Sequence[Collected]) -> None:
        """A request has ended; its whole blocks are found from now on."""
        kept = _Kept(
            parts, {(rank, one["number"]): one["nbytes"] for rank, of in enumerate(parts) for one in of.segments}
        )
        for place, key in enumerate(lookup.keys):
            if self._promised.get(key) == request:
                del self._promised[key]
                self._where[key] = (request, place * self.block_size)
                kept.keys.append(key)
        self._kept[request] = kept

    def forget_promises(self, request: str) -> None:
        """A request failed: it will have no rows."""
        for key in [key for key, of in self._promised.items() if of == request]:
            del self._promised[key]

    def rows_of(self, blocks: Iterable[tuple[str, int]], wanted: Ints) -> list[list[Collected]]:
        """Where the wanted rows of some blocks are, per provider: the lines of every rank; the owner is number 0."""
        by_request: dict[str, list[Ints]] = {}
        for key, start in blocks:
            positions = np.arange(start, start + self.block_size)
            by_request.setdefault(self._where[key][0], []).append(positions[np.isin(positions, wanted)])
        found: list[list[Collected]] = []
        for request, positions in by_request.items():
            at = np.concatenate(positions)
            found.append([part.take(np.isin(part.position, at)) for part in self._kept[request].parts])
        return found

    def evict(self, pinned: Iterable[str] = ()) -> list[str]:
        """Drop the oldest requests past the bound, but for the pinned ones; whom their workers may forget."""
        dropped: list[str] = []
        users = Counter(segment for kept in self._kept.values() for segment in kept.segments)
        sizes = {segment: size for kept in self._kept.values() for segment, size in kept.segments.items()}
        total, held = sum(sizes.values()), set(pinned)
        for request in list(self._kept):
            if request in held or (total <= self.max_bytes and self._kept[request].keys):
                continue
            kept = self._kept.pop(request)
            for segment in kept.segments:  # a whole one is held by any row in it
                users[segment] -= 1
                total -= 0 if users[segment] else sizes[segment]
            for key in kept.keys:
                del self._where[key]
            dropped.append(request)
        return dropped

    def forget(self) -> list[str]:
        """Drop everything; whom their workers may forget."""
        dropped = list(self._kept)
        self._kept.clear()
        self._where.clear()
        self._promised.clear()
        return dropped

    @staticmethod
    def _signed(key: str, spec: CaptureSpec) -> str:
        return f"{key}:{spec.sites}:{spec.layers}:{spec.dtype}"
