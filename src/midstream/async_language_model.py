"""The calls of an `lm`, awaited: for programs that have an event loop, on servers whose calls run side by side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

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
        chunks = self._lm.stream(prompt, **given)
        try:
            while (chunk := await _awaited(partial(next, chunks, None))) is not None:
                yield chunk
        finally:
            chunks.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator, whichever backend


async def _awaited(call: Callable[[], Result]) -> Result:
    """What a call gives, which runs in a thread of its own."""
    from anyio import get_cancelled_exc_class, to_thread

    cancelling = Cancelling()
    token = CANCELLING.set(cancelling)
    try:
        return await to_thread.run_sync(call, abandon_on_cancel=True)
    except get_cancelled_exc_class():
        cancelling.cancel()
        raise
    finally:
        CANCELLING.reset(token)
