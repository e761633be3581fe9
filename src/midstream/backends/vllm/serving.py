"""What the engines of a server have in common: a model that is known, and requests that are checked against it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.backend import BackendCapabilities, ModelFacts
from midstream.core.errors import EngineError
from midstream.core.generation import FinishReason, GenerationParams
from midstream.core.sites import Site, SiteLayout
from midstream.formats.artifacts import ArtifactRegistry, default_registry
from midstream.formats.discovery import Model

from .calls import Request
from .checks import Checks
from .rendering import finish_reason


class Serving(ABC):
    """A ServingEngine; how it is reached, and how the pieces of a request come, is its subclasses' own.

    registry: where artifacts are that specs name; the user's own unless another is given.
    """

    def __init__(self, tokenizer: Any, registry: ArtifactRegistry | None) -> None:
        self.registry = registry or default_registry()
        self._given_tokenizer = self._tokenizer = tokenizer
        self._known: Checks | None = None
        self._closed = False
        self._asked: set[str] = set()

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""
        return self._checks.facts

    @property
    def capabilities(self) -> BackendCapabilities:
        """What can be captured and steered."""
        return self._checks.capabilities()

    @property
    def layouts(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """How wide each site is, by layer."""
        return self._checks.engine.facts.layouts

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self._tokenizer

    @property
    @abstractmethod
    def identity(self) -> Model:
        """What a client of another process negotiates with: facts, fingerprints, and the ids that end a text."""

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""

    @property
    @abstractmethod
    def well(self) -> bool:
        """Whether requests are answered."""

    @abstractmethod
    async def start(self) -> None:
        """Make ready, in the event loop that `run` is used in. ModelLoadError: it cannot be."""

    def check(self, request: ServedRequest) -> None:
        """SpecError or PromptError for what this model cannot do, before anything runs; may be called in a thread."""
        self._checks.served(request)

    async def run(self, request: ServedRequest) -> AsyncGenerator[Grown | Ended]:
        """The pieces of one sequence, `Ended` the last; closed before that, the request is given up.

        Raises MidstreamError where this request failed: CaptureError, EngineError, TransportError.
        """
        asked = await asyncio.to_thread(self._checks.served, request)
        self._asked.add(asked.id)
        try:
            async with aclosing(self._pieces(asked, request.params)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._asked.discard(asked.id)

    @abstractmethod
    def _pieces(self, asked: Request, params: GenerationParams) -> AsyncGenerator[Grown | Ended]:
        """The pieces of one request that is ready."""

    @abstractmethod
    async def close(self) -> None:
        """Give up what runs, and let the model go; idempotent."""

    @property
    def _checks(self) -> Checks:
        if self._closed:
            raise EngineError("this engine was closed")
        if self._known is None:
            raise EngineError("this engine is not up yet: start it")
        return self._known


def reason_of(output: Any, params: GenerationParams) -> FinishReason:
    """Why an output ended; CaptureError where the engine failed at it, EngineError where it gave it up."""
    reason = finish_reason(output, params)
    if reason is None:
        raise EngineError("the engine gave this request up")
    return reason
