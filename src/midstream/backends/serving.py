"""What a server asks of an engine: sequences that come and go, each with wishes of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from midstream.core.backend import BackendCapabilities, ModelFacts
from midstream.core.capture import CaptureSpec
from midstream.core.generation import FinishReason, GenerationParams, TokenLogprob
from midstream.core.interventions import InterventionSpec, OpReceipt
from midstream.core.prompts import PreparedPrompt
from midstream.core.sites import Site, SiteLayout
from midstream.formats.activations import Activations
from midstream.formats.discovery import Model


@dataclass(frozen=True, eq=False)
class ServedRequest:
    """One sequence to generate: `params.n` is 1, and `params.seed` its own seed (None: drawn freely).

    capture: which of its rows are kept. steering: what is done to them; artifacts are in the engine's registry.
    prompt_len: how many of the prompt's tokens are prompt, None for all (a reference that is scored is generation).
    """

    prompt: PreparedPrompt
    params: GenerationParams
    capture: CaptureSpec | None = None
    steering: InterventionSpec | None = None
    prompt_len: int | None = None


@dataclass(frozen=True)
class Grown:
    """New tokens of a sequence; logprobs: one for each, where they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, eq=False)
class Ended:
    """The last word of a sequence: what was done to it, and what was captured, where that was asked for.

    cached: how many of the prompt's rows came from a prefix cache.
    """

    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    steering: tuple[OpReceipt, ...] = ()
    activations: Activations | None = None
    cached: int = 0


class ServingEngine(Protocol):
    """An engine whose requests join the batch when they come, and leave it when they end."""

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""
        ...

    @property
    def capabilities(self) -> BackendCapabilities:
        """What can be captured and steered."""
        ...

    @property
    def layouts(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """How wide each site is, by layer."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        ...

    @property
    def identity(self) -> Model:
        """What a client of another process negotiates with: facts, fingerprints, and the ids that end a text."""
        ...

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        ...

    @property
    def well(self) -> bool:
        """Whether requests are answered."""
        ...

    async def start(self) -> None:
        """Make ready, in the event loop that `run` is used in. ModelLoadError: it cannot be."""
        ...

    def check(self, request: ServedRequest) -> None:
        """SpecError or PromptError for what this model cannot do, before anything runs; may be called in a thread."""
        ...

    def run(self, request: ServedRequest) -> AsyncIterator[Grown | Ended]:
        """The pieces of one sequence, `Ended` the last; closed before that, the request is given up.

        Raises MidstreamError where this request failed: CaptureError, EngineError, TransportError.
        """
        ...

    async def close(self) -> None:
        """Give up what runs, and let the model go; idempotent."""
        ...
