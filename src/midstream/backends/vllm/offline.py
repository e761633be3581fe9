"""A session on a vLLM engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from midstream.core.backend import BackendCapabilities, ModelFacts, Progress, Tokens
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, EngineError
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.formats.artifacts import ArtifactRegistry

from .calls import Call, Request, Settle
from .engine import Engine
from .jobs import Rendered
from .multimodal import rendered
from .rows import Segmented
from .session import EngineSession
from .standing import Standing


class VllmSession(EngineSession):
    """Exclusive; opened by VllmBackend."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        eos: frozenset[int],
        tokenizer: Any,
        registry: ArtifactRegistry,
        capabilities: Callable[[], BackendCapabilities],
        on_close: Callable[[], None],
    ) -> None:
        segmented = Segmented(engine.facts.folders)
        super().__init__(engine, facts, eos, tokenizer, registry, capabilities, on_close, segmented)
        self._llm_engine = engine
        self.standing: Standing | None = None

    def stand(self, spec: CaptureSpec) -> Standing:
        """Capture every request that comes to the engine from now on, whoever submits it.

        One at a time: an earlier one of the same sites, or that was stopped, is forgotten; else BusyError.
        """
        self._open()
        if self.standing is not None:
            if self.standing.on and self.standing.spec.sites != spec.sites:
                raise BusyError(f"a capture of {self.standing.spec.sites[0]} stands on this engine: stop it first")
            self.standing.end()
        self.standing = Standing(self._llm_engine, self._facts, self._segmented, spec)
        return self.standing

    def close(self) -> None:
        """End the session; idempotent."""
        if not self._closed:
            if self.standing is not None:
                with suppress(EngineError):
                    self.standing.end()
            super().close()

    def _call(
        self,
        requests: Sequence[Request],
        params: GenerationParams,
        settle: Settle,
        progress: Progress | None,
        stream: bool = False,
    ) -> Call:
        artifacts = self._artifacts_of(requests)
        self._llm_engine.stage(artifacts, lambda name: self._registry.file_of(artifacts[name]))
        tokens = Tokens(sum(len(request.job.ids) + params.max_tokens for request in requests), progress)
        return Call(self._llm_engine, params, self._eos, requests, settle, tokens.add)

    def _rendered(self, prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[Rendered | None]]:
        return rendered(self._llm_engine, prompts)
