"""What travels with a request to the engine: one JSON text under `extra_args["midstream"]`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    StrictBool,
    field_serializer,
    field_validator,
)

from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error
from midstream.core.interventions import InterventionSpec
from midstream.core.select import Selection, SelectSpec
from midstream.core.sites import Site, as_site, aux_place
from midstream.core.wire import Int, Number, Wire

KEY: Final = "midstream"
"""Where a request's sampling parameters (over HTTP: `vllm_xargs`) hold it."""

FIELDS: Final = (
    "capture", "steering", "activations_transport",
    "output_residual_stream", "apply_steering_vectors", "output_qk", "apply_hooks",
)  # fmt: skip
"""What may stand in a completion's body, and in its `vllm_xargs`, there as JSON in a text; the last four vllm-lens'."""

PROBE: Final = f"{KEY}-probe-"
"""What the ids of the self-test's requests begin with."""

LINES: Final = ("request", "position", "token_id", "segment", "row", "overflowed")
"""What a worker says of each row that it has put down."""


AuxLayerIds = Annotated[
    tuple[Annotated[Int, Field(ge=0)], ...],
    Field(min_length=1),
    AfterValidator(lambda ids: tuple(sorted(set(ids)))),
]
"""vLLM's ids of layers, ascending, each once: k is the stream after k blocks."""


def _spec(value: Any) -> Any:
    return None if value is None else InterventionSpec.of(value, "")


class FileWishes(Wire):
    """A hidden-states file of a request. aux_layer_ids: vLLM's, where k is the stream after k blocks.

    source: taps, or the cache in which vLLM's own extraction puts the states of some layers.

    >>> FileWishes(aux_layer_ids=[3, 0, 3]).places
    (('resid_pre', 0), ('resid_post', 2))
    """

    root: ClassVar[str] = "kv_transfer_params"

    aux_layer_ids: AuxLayerIds
    select: Selection = None
    source: Literal["taps", "cache"] = "taps"

    @property
    def places(self) -> tuple[tuple[Site, int], ...]:
        """The site and layer of each id."""
        return tuple(map(aux_place, self.aux_layer_ids))


class EngineSettings(Wire):
    """What an engine's `additional_config["midstream"]` says; an engine without it is left as it is.

    graph: sites whose taps stand in a compiled graph; steps that want others run without it. row_bytes: what rows that
    wait to be read may take in a worker. graph_rows: how many rows of a step a recorded graph reads. version: ours, so
    that another has another compile cache. Of a server: artifact_dir: where it keeps artifacts (None: a folder of its
    own), artifact_bytes: at most; held_bytes: of activations that wait for whoever asked, and held_seconds: how long.
    """

    root: ClassVar[str] = f"additional_config.{KEY}"

    graph: tuple[Site, ...] = ("resid_post",)
    row_bytes: Annotated[Int, Field(ge=1 << 20)] = 8 << 30
    graph_rows: Annotated[Int, Field(ge=16)] = 128
    version: str = ""
    artifact_dir: str | None = None
    artifact_bytes: Annotated[Int, Field(ge=1 << 16)] = 4 << 30
    held_bytes: Annotated[Int, Field(ge=1 << 16)] = 4 << 30
    held_seconds: Annotated[Number, Field(gt=0)] = 120.0

    @field_validator("graph", mode="before")
    @classmethod
    def _sites(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError("a list of sites")
        return tuple(as_site(site, f"[{place}]") for place, site in enumerate(value))


class EngineRequest(Wire):
    """One request's wishes: what is kept of its rows, and what is done to them.

    id: ours, unique in the engine. prompt_len: how many of its positions are prompt, whatever the engine takes as its
    prompt. max_len: a bound on its positions. These three are set by `settled` where they are left out. first: rows
    before are not wanted (another request has them). decided: what gates decided on this prompt before, by the place
    of their op. file: in place of a capture, rows that are written to a file.

    >>> one = EngineRequest(id="a", prompt_len=2, max_len=4, capture=CaptureSpec(layers=[0]))
    >>> EngineRequest.read(one.text()) == one
    True
    """

    root: ClassVar[str] = "midstream"

    id: Annotated[str, Field(max_length=128)] = ""
    prompt_len: Annotated[Int, Field(ge=0)] = 0
    max_len: Annotated[Int, Field(ge=0, le=1 << 24)] = 0
    first: Annotated[Int, Field(ge=0)] = 0
    capture: CaptureSpec | None = None
    file: FileWishes | None = None
    steering: Annotated[SerializeAsAny[InterventionSpec] | None, BeforeValidator(_spec)] = None
    decided: dict[str, StrictBool] | None = None

    @field_serializer("capture")
    def _capture(self, value: CaptureSpec | None) -> dict[str, Any] | None:
        return None if value is None else value.canonical()

    @field_serializer("steering")
    def _steering(self, value: InterventionSpec | None) -> dict[str, Any] | None:
        return None if value is None else value.canonical()

    @property
    def wants_rows(self) -> bool:
        """Whether any of its rows are kept by taps."""
        return self.capture is not None or self._taped_file is not None

    @property
    def _taped_file(self) -> FileWishes | None:
        return None if self.file is None or self.file.source == "cache" else self.file

    @property
    def sites(self) -> frozenset[Site]:
        """Where it looks or acts, on whatever rank its rows are kept: all choose one form for a step."""
        found: set[Site] = {site for site, _ in self._taped_file.places} if self._taped_file is not None else set()
        found.update(self.capture.sites if self.capture is not None else ())
        found.update(op.site for op in (self.steering.ops if self.steering is not None else ()))
        return frozenset(found)

    @property
    def select(self) -> SelectSpec | None:
        """Which of its rows are wanted, where any are."""
        return self.file.select if self.file is not None else self.capture and self.capture.select

    def settled(self, engine_id: str, prompt_tokens: int, max_tokens: int | None) -> EngineRequest:
        """The same with what the engine itself knows of it, where nothing else was said."""
        return self.model_copy(
            update={
                "id": self.id or engine_id,
                "prompt_len": self.prompt_len or prompt_tokens,
                "max_len": self.max_len or prompt_tokens + (max_tokens or 0),
            }
        )

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
