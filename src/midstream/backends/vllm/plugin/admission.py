"""Every request on its way into an engine that has taps: what is wrong with its wishes is refused here."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from midstream.core.capture import CaptureSpec
from midstream.core.errors import SpecError, spec_error

from ..requests import FIELDS, KEY, PROBE, EngineRequest, text_of
from .extraction import extracted_ids
from .file_settings import FileSettings, file_wishes

ADMISSION: Final = "midstream_admission"
"""The attribute of an input processor that has it."""


@dataclass(eq=False)
class Admission:
    """What is added to requests that others submit. standing: what is captured of all.

    seen: their ids, since then, and whether vLLM says of each only what is new. closed: why no request may have wishes.
    served: of a server, whose routes alone give requests wishes, by ids of theirs; check: what they say of a prompt.
    """

    files: FileSettings | None
    depth: int
    extracted: tuple[int, ...] | None = None
    standing: CaptureSpec | None = None
    closed: str | None = None
    served: set[str] | None = None
    check: Callable[[EngineRequest, Sequence[int], int], None] | None = None
    seen: dict[str, bool] = field(default_factory=dict[str, bool])

    def open(self, check: Callable[[EngineRequest, Sequence[int], int], None] | None = None) -> None:
        """The engine holds what its self-test says: from now on requests may have wishes.

        check: of a `vllm serve`, whose routes alone may ask; None: whoever has the engine asks, under its own ids.
        """
        self.closed, self.check = None, check
        self.served = None if check is None else set()

    def wishes_of(self, request_id: str, params: Any) -> EngineRequest | None:
        """What is to be done to a request; None: nothing more than it says itself. SpecError for what is wrong."""
        if not hasattr(params, "max_tokens") or request_id.startswith(PROBE):  # pooling has no rows of ours
            return None
        extra: Mapping[str, Any] = params.extra_args or {}
        asked = extra.get("kv_transfer_params")
        text = extra.get(KEY)
        if self.closed is not None and (text is not None or (asked and self.files is not None)):
            raise spec_error("E_UNKNOWN_KIND", f"extra_args.{KEY}", self.closed)
        if self.served is not None and (others := [name for name in FIELDS if extra.get(name) is not None]):
            message = "is read by /v1/completions and /v1/chat/completions: send it there"
            raise spec_error("E_BAD_PARAM", f"vllm_xargs.{others[0]}", message)
        if text is not None:
            own = EngineRequest.read(text)
            if own.id not in (self.served if self.served is not None else (request_id,)):
                message = (
                    "is written by calls of an lm: ms.load(llm, backend='vllm') gives one"
                    if self.served is None
                    else "is read by /v1/completions and /v1/chat/completions: send it there"
                )
                raise spec_error("E_BAD_PARAM", f"extra_args.{KEY}", message)
            if self.files is not None and asked:
                message = "a call of an lm gets no file: cap.save_hidden_states writes one"
                raise spec_error("E_BAD_PARAM", "kv_transfer_params", message)
            self._check_drafts(own)
            return None
        file = None if self.files is None else file_wishes(asked, self.files, self.depth, self.extracted)
        if file is not None:
            if params.stop:
                message = "a stop string ends a request outside the engine, and no path comes back: use stop_token_ids"
                raise spec_error("E_BAD_PARAM", "stop", message)
            return self._check_drafts(EngineRequest(file=file))
        return None if self.standing is None else self._check_drafts(EngineRequest(capture=self.standing))

    def _check_drafts(self, wishes: EngineRequest) -> EngineRequest:
        """The same; E_SELECTION for generated rows chosen by token where a pass may hold tokens that are not kept."""
        select = wishes.select if wishes.wants_rows else None
        if self.extracted is not None and select is not None:
            for name in ("generation_tokens", "exclude_generation_tokens"):
                if getattr(select, name) is not None:
                    message = "this engine's passes hold drafts of tokens: choose generated rows by position"
                    raise spec_error("E_SELECTION", f"select.{name}", message)
        return wishes


def as_vllms(error: SpecError) -> Exception:
    """The same as vLLM's own class for it, without which a server says 500 and may end."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(str(error), parameter=error.path)


def close(processor: Any) -> None:
    """Of an engine that was not put to the self-test: no request may have wishes."""
    admission: Admission = getattr(processor, ADMISSION)
    admission.closed = (
        "this engine was not put to the self-test: start it with `midstream vllm-serve`, or name midstream in "
        "VLLM_PLUGINS, or use vllm.LLM"
    )


def attach(processor: Any) -> None:
    """Let every request that an engine's input processor takes be admitted first."""
    config = processor.vllm_config
    depth = config.model_config.hf_text_config.num_hidden_layers
    files = FileSettings.read(config)
    if files is not None:
        files.check_layers(depth)
    admission = Admission(files, depth, extracted_ids(config))
    original: Callable[..., Any] = processor.process_inputs

    def admitted(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        wishes = admission.wishes_of(request_id, params)
        if wishes is not None:
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), KEY: wishes.text()}
        made = original(request_id, prompt, params, *args, **kwargs)
        if admission.check is not None and (text := text_of(params)) is not None:
            admission.check(EngineRequest.read(text), made.prompt_token_ids or (), params.max_tokens or 0)
        if wishes is not None and wishes.capture is not None:  # and vLLM takes it
            admission.seen[request_id] = params.output_kind.name == "DELTA"
        return made

    def process_inputs(*args: Any, **kwargs: Any) -> Any:
        try:
            return admitted(*args, **kwargs)
        except SpecError as error:
            if admission.served is None and admission.closed is None:
                raise
            raise as_vllms(error) from error

    processor.process_inputs = process_inputs
    if hasattr(processor, "process_inputs_async"):  # made of the method before it was ours
        from vllm.utils.async_utils import make_async

        processor.process_inputs_async = make_async(process_inputs)
    setattr(processor, ADMISSION, admission)
