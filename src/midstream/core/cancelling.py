"""Calls that nobody waits for any more."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from typing import Any


@dataclass(eq=False)
class Cancelling:
    """What ends the work of a call that nobody waits for any more."""

    _ends: list[Callable[[], object]] = field(default_factory=list[Any])
    _cancelled: bool = False
    _lock: Lock = field(default_factory=Lock)

    def add(self, end: Callable[[], object]) -> None:
        """Call this when it is cancelled, or at once if it was."""
        with self._lock:
            self._ends.append(end)
            late = self._cancelled
        if late:
            end()

    def cancel(self) -> None:
        """End all of it."""
        with self._lock:
            self._cancelled = True
            ends = list(self._ends)
        for end in ends:
            end()


CANCELLING: ContextVar[Cancelling | None] = ContextVar("midstream_cancelling", default=None)
"""That of the call under way, where it is awaited."""
