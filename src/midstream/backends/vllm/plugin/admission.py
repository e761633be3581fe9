"""Every request on its way into an engine that has taps: what is wrong with its wishes is refused here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error

from ..requests import KEY, EngineRequest
from .file_settings import FileSettings, file_wishes

ADMISSION: Final = "midstream_admission"
"""The attribute of an input processor that has it."""


@dataclass(eq=False)
class Admission:
    """What is added to requests that others submit. standing: what is captured of all.

    seen: their ids, since then, and whether vLLM says of each only what is new.
    """

    files: FileSettings | None
    depth: int
    standing: CaptureSpec | None = None
    seen: dict[str, bool] = field(default_factory=dict[str, bool])

    def admitted(self, request_id: str, params: Any) -> Any:
        """A request's sampling parameters, with what is to be done to it; SpecError for wishes that are wrong."""
        if not hasattr(params, "max_tokens"):  # pooling: it has no rows of ours
            return params
        extra: dict[str, Any] = dict(params.extra_args or {})
        text = extra.get(KEY)
        wishes = EngineRequest() if text is None else EngineRequest.read(text)
        asked = extra.get("kv_transfer_params")
        file = None if self.files is None else file_wishes(asked, self.files, self.depth)
        if wishes.wants_rows:
            if file is not None and asked:
                raise spec_error("E_BAD_PARAM", "kv_transfer_params", "this request is captured: it gets no file too")
            return params
        if file is not None:
            if params.stop:
                message = "a stop string ends a request outside the engine, and no path comes back: use stop_token_ids"
                raise spec_error("E_BAD_PARAM", "stop", message)
            more: dict[str, Any] = {"file": file}
        elif self.standing is not None:
            more = {"capture": self.standing}
            self.seen[request_id] = params.output_kind.name == "DELTA"
        else:
            return params
        admitted = params.clone()
        admitted.extra_args = {**extra, KEY: wishes.model_copy(update=more).text()}
        return admitted


def attach(processor: Any) -> None:
    """Let every request that an engine's input processor takes be admitted first."""
    config = processor.vllm_config
    depth = config.model_config.hf_text_config.num_hidden_layers
    admission = Admission(FileSettings.of(config), depth)
    original: Callable[..., Any] = processor.process_inputs

    def process_inputs(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(request_id, prompt, admission.admitted(request_id, params), *args, **kwargs)

    processor.process_inputs = process_inputs
    setattr(processor, ADMISSION, admission)
