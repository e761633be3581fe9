"""A session on servers: the same as on an engine in this process, but that several calls may run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from midstream.core.backend import Progress, Tokens
from midstream.core.errors import PromptError, spec_error
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.formats.artifacts import ArtifactRegistry

from ..calls import Request, Settle
from ..jobs import Rendered
from ..session import EngineSession
from .answers import Downloaded
from .calls import ServedCall
from .loop import Loop
from .reaching import Reached


class ServedSession(EngineSession):
    """Opened by ServedBackend."""

    def __init__(
        self,
        loop: Loop,
        reached: Reached,
        registry: ArtifactRegistry,
        on_close: Callable[[], None],
    ) -> None:
        self._downloaded = Downloaded()
        self._loop, self._asking = loop, reached.asking
        super().__init__(
            reached.host,
            reached.facts,
            reached.asking.eos,
            reached.tokenizer,
            registry,
            lambda: reached.capabilities,
            on_close,
            self._downloaded,
        )

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
        return ServedCall(
            self._loop, self._asking, params, requests, settle, self._downloaded, artifacts, tokens.add, stream
        )

    def _rendered(self, prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[Rendered | None]]:
        for index, prompt in enumerate(prompts):
            if prompt.multi_modal_data:
                raise PromptError(f"prompt {index}: vllm-serve takes no multi_modal_data: backend='vllm' does")
        return list(prompts), [None] * len(prompts)
