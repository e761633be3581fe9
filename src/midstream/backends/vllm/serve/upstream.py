"""UpstreamEngine: one or more `vllm serve` behind a server of ours, asked from its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

from midstream.backends.serving import Ended, Grown
from midstream.core.backend import BackendSpec
from midstream.core.errors import EngineError
from midstream.core.generation import GenerationParams
from midstream.formats.activations import Activations
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.discovery import Model
from midstream.taps.pages import PAGES
from midstream.taps.step import whole_sequence

from ..calls import Request, op_receipts
from ..checks import Checks
from ..rendering import prompt_logprobs, token_logprobs
from ..serving import Serving, reason_of
from .options import ServeOptions
from .reaching import Reached, reached

AT_A_TIME: Final = 256
"""Requests on each server, unless `max_concurrency` says otherwise: its engine has a queue of its own."""
_PERIOD: Final = 2.0
"""Seconds between looks whether servers are well."""


class UpstreamEngine(Serving):
    """A ServingEngine. spec: as of ServedBackend, whose `base_url` may be several."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        super().__init__(tokenizer, registry)
        self.spec = replace(spec, options={"max_concurrency": AT_A_TIME, **spec.options, **spec.secrets})
        self._options = ServeOptions.read(self.spec)
        self._reached: Reached | None = None
        self._well = False
        self._looking: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[Activations | None]] = set()

    # --- up and down

    async def start(self) -> None:
        """Ask the servers what they are. ModelLoadError: they cannot be reached, or are not of one model."""
        found = await reached(self.spec, self._options, self._given_tokenizer, self.registry)
        self._reached, self._tokenizer, self._well = found, found.tokenizer, True
        self._known = Checks(found.host, found.facts, lambda: found.capabilities, self.registry)
        self._looking = asyncio.create_task(self._look(found))

    async def close(self) -> None:
        """Give up what runs, and let go of all connections; idempotent."""
        self._closed, self._well = True, False
        found, self._reached = self._reached, None
        if found is None:
            return
        assert self._looking is not None
        ending = [self._looking, *self._answers]
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        await found.asking.pool.close()
        PAGES.give_up()

    async def _look(self, found: Reached) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            self._well = any(await asyncio.gather(*(one.is_well() for one in found.asking.pool.servers)))

    @property
    def identity(self) -> Model:
        """What the servers say of their model."""
        return self._up.said.model

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests are with a server, and how many wait for a place on one."""
        running = 0 if self._reached is None else sum(one.running for one in self._reached.asking.pool.servers)
        return running, max(len(self._asked) - running, 0)

    @property
    def well(self) -> bool:
        """Whether a server has said so, not long ago."""
        return self._well

    # --- requests

    async def _pieces(self, asked: Request, params: GenerationParams) -> AsyncGenerator[Grown | Ended]:
        news = asyncio.Event()
        artifacts = {} if asked.job.spec is None else asked.job.spec.artifacts()
        grown = None if params.prompt_logprobs is not None else news.set  # a prompt's come in no stream
        answer = asyncio.create_task(self._up.asking.answered(asked, params, artifacts, grown))
        self._answers.add(answer)
        answer.add_done_callback(lambda _: news.set())
        given, ended = 0, False
        try:
            while not ended:
                await news.wait()
                news.clear()
                ended = answer.done()
                if asked.output is not None and (new := tuple(asked.output.outputs[0].token_ids[given:])):
                    found = asked.output.outputs[0].logprobs
                    found = None if found is None else found[given : given + len(new)]
                    given += len(new)
                    yield Grown(new, token_logprobs(found, new, params.logprobs))
            if answer.cancelled():
                raise EngineError("this engine was closed")
            activations = answer.result()
            said: Any = asked.output
            rows = whole_sequence(asked.consumed, len(asked.job.prompt.token_ids))
            yield Ended(
                reason_of(said.outputs[0], params),
                prompt_logprobs(said.prompt_logprobs, asked.job.ids, params.prompt_logprobs),
                op_receipts(asked.job.ops, rows, said.described, "the request"),
                activations,
                int(said.described["cached"]),
            )
        finally:
            self._answers.discard(answer)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    @property
    def _up(self) -> Reached:
        if self._reached is None:
            raise EngineError("this engine was closed" if self._closed else "this engine is not up yet: start it")
        return self._reached
