"""Stretches: room in one long table for the positions of each request, where requests come and go."""

from __future__ import annotations

from typing import Final

import numpy as np

from .step import Ints

_SMALLEST: Final = 16


class Stretches:
    """Gives each request a stretch of a power of two, and takes it back.

    >>> stretches = Stretches()
    >>> stretches.admit(5, length=20)
    >>> stretches.admit(2, length=3)
    >>> stretches.at(np.array([5, 2]), np.array([19, 0])).tolist(), stretches.size
    ([19, 32], 48)
    """

    def __init__(self) -> None:
        self.size = 0
        self._length: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._offset = np.full(64, -1, dtype=np.int64)

    def admit(self, request: int, length: int) -> None:
        """Make room for `length` positions of a request, whose index no other has."""
        size = 1 << max(_SMALLEST.bit_length() - 1, (length - 1).bit_length())
        free = self._free.get(size)
        if free:
            offset = free.pop()
        else:
            offset, self.size = self.size, self.size + size
        if request >= len(self._offset):
            more = np.full(max(request + 1, 2 * len(self._offset)) - len(self._offset), -1, dtype=np.int64)
            self._offset = np.concatenate([self._offset, more])
        self._offset[request], self._length[request] = offset, size

    def dismiss(self, request: int) -> None:
        """Take a request's room back."""
        self._free.setdefault(self._length.pop(request), []).append(int(self._offset[request]))
        self._offset[request] = -1

    def of(self, request: int, length: int) -> slice:
        """Where a request's first `length` positions are."""
        return slice(int(self._offset[request]), int(self._offset[request]) + length)

    def at(self, request: Ints, position: Ints) -> Ints:
        """Where some rows are, `[rows]`."""
        return self._offset[request] + position
