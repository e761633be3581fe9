"""An event loop in a thread of its own, for callers that have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

Result = TypeVar("Result")


class Loop:
    """Runs coroutines until it is closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal(name="midstream-serve"))

    def run(self, what: Callable[..., Awaitable[Result]], *args: Any) -> Result:
        """What a coroutine function gives; interrupted, its coroutine is cancelled."""
        future = self.begin(what, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def begin(self, what: Callable[..., Awaitable[Result]], *args: Any) -> Future[Result]:
        """Start a coroutine function; cancelling the future cancels it."""
        return self._portal.start_task_soon(what, *args)

    def close(self) -> None:
        """End, once what runs has ended."""
        self._stack.close()
