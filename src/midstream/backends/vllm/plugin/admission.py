"""Every request on its way into an engine that has taps: what is wrong with its wishes is refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error

from ..requests import KEY, PROBE, EngineRequest
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

    def wishes_of(self, request_id: str, params: Any) -> EngineRequest | None:
        """What is to be done to a request; None: nothing more than it says itself. SpecError for what is wrong."""
        if not hasattr(params, "max_tokens") or request_id.startswith(PROBE):  # pooling has no rows of ours
            return None
        extra: Mapping[str, Any] = params.extra_args or {}
        asked = extra.get("kv_transfer_params")
        if (text := extra.get(KEY)) is not None:
            if EngineRequest.read(text).id != request_id:
                message = "is written by calls of an lm: ms.load(llm, backend='vllm') gives one"
                raise spec_error("E_BAD_PARAM", f"extra_args.{KEY}", message)
            if self.files is not None and asked:
                message = "a call of an lm gets no file: cap.save_hidden_states writes one"
                raise spec_error("E_BAD_PARAM", "kv_transfer_params", message)
            return None
        file = None if self.files is None else file_wishes(asked, self.files, self.depth)
        if file is not None:
            if params.stop:
                message = "a stop string ends a request outside the engine, and no path comes back: use stop_token_ids"
                raise spec_error("E_BAD_PARAM", "stop", message)
            return EngineRequest(file=file)
        return None if self.standing is None else EngineRequest(capture=self.standing)


def attach(processor: Any) -> None:
    """Let every request that an engine's input processor takes be admitted first."""
    config = processor.vllm_config
    depth = config.model_config.hf_text_config.num_hidden_layers
    files = FileSettings.read(config)
    if files is not None:
        files.check_layers(depth)
    admission = Admission(files, depth)
    original: Callable[..., Any] = processor.process_inputs

    def process_inputs(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        wishes = admission.wishes_of(request_id, params)
        if wishes is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), KEY: wishes.text()}
        made = original(request_id, prompt, params, *args, **kwargs)
        if wishes is not None and wishes.capture is not None:  # and vLLM takes it
            admission.seen[request_id] = params.output_kind.name == "DELTA"
        return made

    processor.process_inputs = process_inputs
    setattr(processor, ADMISSION, admission)
