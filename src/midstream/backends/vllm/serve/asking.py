"""One request to the servers of a pool, from any event loop: sent, streamed, and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from midstream.core.artifacts import Artifact
from midstream.core.errors import EngineError, SpecError, UnfitAnswerError
from midstream.core.generation import GenerationParams
from midstream.formats.activations import Activations, held_tensors, read_activations

from ..calls import Request
from ..checks import Layouts
from .answers import Growing, Said, body_of, check_fit, fitting
from .artifacts import Uploads
from .pool import Pool, key_of
from .transport import Server

COMPLETIONS: Final = "/v1/completions"


@dataclass(frozen=True, eq=False)
class Asking:
    """How requests get to the servers: which model is meant, by its name and fingerprint, and what ends a text.

    facts: the model's sites.
    """

    pool: Pool
    uploads: Uploads
    model: str
    fingerprint: str
    eos: frozenset[int]
    grammar_eos: frozenset[int]
    facts: Layouts

    async def answered(
        self,
        request: Request,
        params: GenerationParams,
        artifacts: Mapping[str, Artifact],
        grown: Callable[[], None] | None = None,
    ) -> Activations | None:
        """What was captured of a request, once it has its output; where a server fails, another is asked.

        artifacts: at least those of its spec, by id. grown: called whenever more of the output has come; None: it comes
        at once. UnfitAnswerError: an answer has not what was asked for.
        """
        job = request.job
        key = key_of(job.ids, (job.prompt.cache_salt, None if job.spec is None else job.spec.digest))
        mine = {} if job.spec is None else {name: artifacts[name] for name in job.spec.artifacts()}

        async def from_one(server: Server) -> Activations | None:
            await self.uploads.ensure(server, mine)
            try:
                return await self._from(server, request, params, grown)
            except SpecError as error:
                if error.code != "E_ARTIFACT_MISSING":
                    raise
            await self.uploads.again(server, mine)  # somebody deleted it
            return await self._from(server, request, params, grown)

        return await self.pool.ask(key, from_one)

    async def _from(
        self, server: Server, request: Request, params: GenerationParams, grown: Callable[[], None] | None
    ) -> Activations | None:
        eos = self.eos if request.job.constraint is None else self.eos | self.grammar_eos
        body = body_of(request, params, eos, self.model, self.fingerprint, grown is not None)
        if grown is not None:
            said = await _streamed(server, request, body, grown)
        else:
            answer = await server.json("POST", COMPLETIONS, body)
            with fitting():
                said = Said.read(answer)
        assert said.described is not None
        if said.described["fingerprint"] != self.fingerprint:
            raise EngineError("the server has another model now: load it again")
        request.described, request.output = said.described, said
        return None if request.capture is None else await self._captured(server, request, said.activations)

    async def _captured(self, server: Server, request: Request, plain: Any) -> Activations:
        """What an answer has of a request's rows, whose form is looked at before they are fetched."""
        if plain is None:
            raise UnfitAnswerError("the server answered without activations")
        with fitting():
            held = held_tensors(plain)
            check_fit(request, read_activations(plain, lambda one: torch.empty(one.shape, device="meta")), self.facts)
        tensors = {one.handle: await server.tensor(one) for one in held}
        with fitting():
            return read_activations(plain, lambda one: tensors[one.handle])


async def _streamed(server: Server, request: Request, body: Any, grown: Callable[[], None]) -> Said:
    growing = Growing()
    request.output = growing.said
    async with server.events(COMPLETIONS, body) as events:
        async for event in events:
            with fitting():
                growing.take(event)
                more = event["choices"] and not growing.said.finished
            if more:
                grown()
    if not growing.said.finished:
        raise UnfitAnswerError("the stream ended without our plugin's word")
    return growing.said
