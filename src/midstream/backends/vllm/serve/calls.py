"""One call against servers: its requests, as many at a time as the servers take, and what each of them gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import anyio

from midstream.core.artifacts import Artifact
from midstream.core.cancelling import CANCELLING
from midstream.core.errors import (
    CaptureError,
    EngineError,
    FileFormatError,
    MidstreamError,
    PromptError,
    SpecError,
    TransportError,
)
from midstream.core.generation import GenerationParams
from midstream.formats.activations import Activations, held_tensors, read_activations

from ..calls import Request, Settle
from .answers import Downloaded, Growing, Said, body_of
from .artifacts import Uploads
from .loop import Loop
from .pool import Pool, key_of
from .transport import Server

COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, eq=False)
class Asking:
    """How requests get to the servers: which model is meant, by its name and fingerprint, and what ends a text."""

    loop: Loop
    pool: Pool
    uploads: Uploads
    model: str
    fingerprint: str
    eos: frozenset[int]
    grammar_eos: frozenset[int]


@dataclass(frozen=True)
class _Heard:
    """News of a request. found: what was captured of one that has ended."""

    request: Request
    ended: bool
    found: Activations | None = None


@dataclass(eq=False)
class ServedCall:
    """Requests of one call. settle: called as requests end, in the caller's thread. stream: each as it grows."""

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
        task = self.asking.loop.begin(self._all)
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
            found = await self._asked(request)
        except (TransportError, CaptureError, FileFormatError) as error:  # its own: the others go on
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

    async def _asked(self, request: Request) -> Activations | None:
        job = request.job
        key = key_of(job.ids, (job.prompt.cache_salt, None if job.spec is None else job.spec.digest))
        mine = {} if job.spec is None else {name: self.artifacts[name] for name in job.spec.artifacts()}

        async def from_one(server: Server) -> Activations | None:
            await self.asking.uploads.ensure(server, mine)
            try:
                return await self._from(server, request)
            except SpecError as error:
                if error.code != "E_ARTIFACT_MISSING":
                    raise
            await self.asking.uploads.again(server, mine)  # somebody deleted it
            return await self._from(server, request)

        return await self.asking.pool.ask(key, from_one)

    async def _from(self, server: Server, request: Request) -> Activations | None:
        asking = self.asking
        eos = asking.eos if request.job.constraint is None else asking.eos | asking.grammar_eos
        body = body_of(request, self.params, eos, asking.model, asking.fingerprint, self.stream)
        if self.stream:
            said = await self._streamed(server, request, body)
        else:
            said = Said.read(await server.json("POST", COMPLETIONS, body))
        self._check(said)
        found: Activations | None = None
        if request.capture is not None:
            if said.activations is None:
                raise CaptureError("the server answered without activations")
            tensors = {one.handle: await server.tensor(one) for one in held_tensors(said.activations)}
            found = read_activations(said.activations, lambda one: tensors[one.handle])
        request.described, request.output = said.described, said
        return found

    async def _streamed(self, server: Server, request: Request, body: Any) -> Said:
        growing = Growing()
        request.output = growing.said
        async with server.events(COMPLETIONS, body) as events:
            async for event in events:
                growing.take(event)
                if event["choices"] and not growing.said.finished:
                    self._said.put(_Heard(request, False))
        if not growing.said.finished:
            raise FileFormatError("the stream ended without our plugin's word")
        return growing.said

    def _check(self, said: Said) -> None:
        """EngineError where another model answered."""
        assert said.described is not None
        if said.described["fingerprint"] != self.asking.fingerprint:
            raise EngineError("the server has another model now: load it again")
