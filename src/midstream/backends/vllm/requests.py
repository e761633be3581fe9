"""What travels with a request to the engine: one JSON text under `extra_args["midstream"]`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field, SerializeAsAny, StrictBool, field_serializer

from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error
from midstream.core.interventions import InterventionSpec
from midstream.core.wire import Int, Wire

KEY: Final = "midstream"
"""Where a request's sampling parameters (over HTTP: `vllm_xargs`) hold it."""

LINES: Final = ("request", "position", "token_id", "segment", "row", "overflowed")
"""What a worker says of each row that it has put down."""


def _spec(value: Any) -> Any:
    return None if value is None else InterventionSpec.of(value, "")


class EngineRequest(Wire):
    """One request's wishes: what is kept of its rows, and what is done to them.

    id: ours, unique in the engine. prompt_len: how many of its positions are prompt, whatever the engine takes as its
    prompt. max_len: a bound on its positions. first: rows before are not wanted (another request has them). decided:
    what gates decided on this prompt before, by the place of their op.

    >>> one = EngineRequest(id="a", prompt_len=2, max_len=4, capture=CaptureSpec(layers=[0]))
    >>> EngineRequest.read(one.text()) == one
    True
    """

    root: ClassVar[str] = "midstream"

    id: Annotated[str, Field(min_length=1, max_length=128)]
    prompt_len: Annotated[Int, Field(ge=1)]
    max_len: Annotated[Int, Field(ge=1, le=1 << 24)]
    first: Annotated[Int, Field(ge=0)] = 0
    capture: CaptureSpec | None = None
    steering: Annotated[SerializeAsAny[InterventionSpec] | None, BeforeValidator(_spec)] = None
    decided: dict[str, StrictBool] | None = None

    @field_serializer("capture")
    def _capture(self, value: CaptureSpec | None) -> dict[str, Any] | None:
        return None if value is None else value.canonical()

    @field_serializer("steering")
    def _steering(self, value: InterventionSpec | None) -> dict[str, Any] | None:
        return None if value is None else value.canonical()

    def text(self) -> str:
        """Canonical JSON, tensors by id."""
        return json.dumps(self.model_dump(exclude_none=True), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, text: Any) -> EngineRequest:
        """A request from its text; SpecError for what is none."""
        try:
            value = json.loads(text) if isinstance(text, str) else text
        except ValueError as error:
            raise spec_error("E_BAD_PARAM", cls.root, f"is no JSON: {error}") from None
        return cls.of(value)


def text_of(sampling_params: Any) -> str | None:
    """The text under our key in a request's sampling parameters; None in one that has none."""
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(KEY) if isinstance(extra, Mapping) else None
