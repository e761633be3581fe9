"""One call against servers: its requests, as many at a time as the servers take, and what each of them gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import anyio

from midstream.core.artifacts import Artifact
from midstream.core.cancelling import CANCELLING
from midstream.core.errors import CaptureError, EngineError, MidstreamError, PromptError, TransportError
from midstream.core.generation import GenerationParams
from midstream.formats.activations import Activations

from ..calls import Request, Settle
from .answers import Downloaded, Said
from .asking import Asking
from .loop import Loop


@dataclass(frozen=True)
class _Heard:
    """News of a request. found: what was captured of one that has ended."""

    request: Request
    ended: bool
    found: Activations | None = None


@dataclass(eq=False)
class ServedCall:
    """Requests of one call. settle: called as requests end, in the caller's thread. stream: each as it grows."""

    loop: Loop
    asking: Asking
    params: GenerationParams
    requests: Sequence[Request]
    settle: Settle
    downloaded: Downloaded
    artifacts: Mapping[str, Artifact]
    done: Callable[[int], None] = lambda _: None
    stream: bool = False
    _said: SimpleQueue[Any] = field(default_factory=SimpleQueue)

    def run(self) -> None:
        """Run all of them to their ends."""
        for _ in self.outputs():
            pass

    def outputs(self) -> Iterator[Request]:
        """The same, giving each request whenever a server has said more of it."""
        task = self.loop.begin(self._all)
        if (cancelling := CANCELLING.get()) is not None:
            cancelling.add(lambda: self._said.put(EngineError("the call was cancelled")))
        try:
            waiting = len(self.requests)
            while waiting:
                heard = self._said.get()
                if isinstance(heard, BaseException):
                    raise heard
                if heard.ended:
                    waiting -= 1
                    self._settle(heard)
                yield heard.request
        finally:
            task.cancel()

    def _settle(self, heard: _Heard) -> None:
        request = heard.request
        self.done(len(request.job.ids) + len(request.generated))
        if request.wishes:
            with self.downloaded.collected(heard.found) as part:
                self.settle([request], [part])

    async def _all(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for request in self.requests:
                    group.start_soon(self._one, request)
        except BaseException as error:
            self._said.put(error)
            raise

    async def _one(self, request: Request) -> None:
        found: Activations | None = None
        try:
            grown = partial(self._said.put, _Heard(request, False)) if self.stream else None
            found = await self.asking.answered(request, self.params, self.artifacts, grown)
        except (TransportError, CaptureError) as error:  # its own: the others go on
            request.error = error
            if request.output is None:
                request.output = Said.failed()
        except PromptError as error:
            self._said.put(PromptError(f"prompt {request.index}: {error}"))
            return
        except MidstreamError as error:
            self._said.put(error)
            return
        self._said.put(_Heard(request, True, found))
