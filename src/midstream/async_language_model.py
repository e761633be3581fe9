"""The calls of an `lm`, awaited: for programs that have an event loop, on servers whose calls run side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .core.cancelling import CANCELLING, Cancelling

if TYPE_CHECKING:
    from torch import Tensor

    from .core.generation import Completion
    from .core.result import CaptureResult
    from .core.stream import Chunk
    from .language_model import LanguageModel

Result = TypeVar("Result")


class AsyncLanguageModel:
    """`lm.aio`: arguments and results are those of `lm`'s own calls; cancelled, a call's requests end at the server."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm

    async def capture(self, prompts: Any, **given: Any) -> CaptureResult:
        """See LanguageModel.capture."""
        return await _awaited(partial(self._lm.capture, prompts, **given))

    async def generate(self, prompts: Any, **given: Any) -> list[Completion]:
        """See LanguageModel.generate."""
        return await _awaited(partial(self._lm.generate, prompts, **given))

    async def score(self, prompts: Any, references: Any, **given: Any) -> Tensor:
        """See LanguageModel.score."""
        return await _awaited(partial(self._lm.score, prompts, references, **given))

    async def stream(self, prompt: Any, **given: Any) -> AsyncIterator[Chunk]:
        """See LanguageModel.stream."""
        chunks, cancelling = self._lm.stream(prompt, **given), Cancelling()
        try:
            while (chunk := await _awaited(partial(next, chunks, None), cancelling)) is not None:
                yield chunk
        finally:
            cancelling.cancel()
            await asyncio.shield(_in_thread(chunks.close))  # pyright: ignore  # a generator, whichever backend


_THREADS: Final = 64
"""Calls that run at a time; more wait."""


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="midstream-aio")


def _in_thread(call: Callable[[], Result]) -> asyncio.Future[Result]:
    return asyncio.get_running_loop().run_in_executor(_threads(), copy_context().run, call)


async def _awaited(call: Callable[[], Result], cancelling: Cancelling | None = None) -> Result:
    """What a call gives, which runs in a thread of its own; cancelled, its work ends first."""
    cancelling = cancelling or Cancelling()
    token = CANCELLING.set(cancelling)
    running = _in_thread(call)
    CANCELLING.reset(token)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancelling.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # it has been told
        raise
