"""A session on servers: the same as on an engine in this process, but that several calls may run at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midstream.core.backend import BackendCapabilities, ModelFacts, Progress, Tokens
from midstream.core.errors import PromptError, spec_error
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.core.sites import Site, SiteLayout
from midstream.formats.artifacts import ArtifactRegistry

from ..calls import Request, Settle
from ..jobs import Rendered
from ..reuse import RowStore
from ..session import EngineSession
from .answers import Downloaded
from .calls import Asking, ServedCall


@dataclass(frozen=True, eq=False)
class ServedFacts:
    """What servers say of their model's sites."""

    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    refused: Mapping[Site, str]


@dataclass(frozen=True, eq=False)
class ServedHost:
    """An engine behind a server, which keeps its own rows for reuse."""

    facts: ServedFacts
    vocabulary: int
    has_tokenizer: bool
    store: RowStore = field(default_factory=lambda: RowStore(1, 0))

    def release(self, ids: Sequence[str]) -> None:
        """A server lets go of rows itself."""


class ServedSession(EngineSession):
    """Opened by ServedBackend."""

    def __init__(
        self,
        asking: Asking,
        host: ServedHost,
        facts: ModelFacts,
        tokenizer: Any,
        registry: ArtifactRegistry,
        capabilities: Callable[[], BackendCapabilities],
        on_close: Callable[[], None],
    ) -> None:
        self._downloaded = Downloaded()
        super().__init__(host, facts, asking.eos, tokenizer, registry, capabilities, on_close, self._downloaded)
        self._asking = asking

    def _call(
        self,
        requests: Sequence[Request],
        params: GenerationParams,
        settle: Settle,
        progress: Progress | None,
        stream: bool = False,
    ) -> ServedCall:
        if stream and params.prompt_logprobs is not None:
            message = "a stream of vllm-serve has none: use lm.generate"
            raise spec_error("E_UNKNOWN_KIND", "generation.prompt_logprobs", message)
        tokens = Tokens(sum(len(request.job.ids) + params.max_tokens for request in requests), progress)
        artifacts = self._artifacts_of(requests)
        return ServedCall(self._asking, params, requests, settle, self._downloaded, artifacts, tokens.add, stream)

    def _rendered(self, prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[Rendered | None]]:
        for index, prompt in enumerate(prompts):
            if prompt.multi_modal_data:
                raise PromptError(f"prompt {index}: vllm-serve takes no multi_modal_data: backend='vllm' does")
        return list(prompts), [None] * len(prompts)
