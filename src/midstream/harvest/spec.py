"""HarvestSpec: what of each record is kept, how records become sequences, and how large a shard is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from midstream.core.capture import CaptureSpec
from midstream.core.errors import spec_error
from midstream.core.wire import Int, Wire

Pool = Literal["mean", "last"]
TooLong = Literal["refuse", "split", "truncate"]
SHARD_TOKENS: Final = 1 << 17
SHARD_BYTES: Final = 1 << 29


class HarvestSpec(Wire):
    """The part of a harvest that its bytes follow from, beside the model and the input.

    capture: sites, layers, rows (of prompts: a harvest generates nothing) and storage type. pool: one row for each
    sample, the mean of its selected rows in float32 or the last of them. context: tokens of the longest sequence; None
    is the model's. too_long: what becomes of a longer document: refused, split into sequences of `context`, or
    truncated to the first. packed: documents are laid one after the other and cut every `context` tokens; they do not
    attend to one another unless `across`. stride: from one sequence's start to the next's where something is split or
    packed; what two share is read twice and kept once. A shard is closed once it has `shard_tokens` tokens or rows of
    `shard_bytes`.

    >>> HarvestSpec(capture=CaptureSpec(layers=[12]), too_long="split", context=512).canonical()["context"]
    512
    """

    root: ClassVar[str] = "harvest"

    capture: CaptureSpec = Field(default_factory=CaptureSpec)
    pool: Pool | None = None
    context: Annotated[Int, Field(ge=1)] | None = None
    too_long: TooLong = "refuse"
    packed: bool = False
    across: bool = False
    stride: Annotated[Int, Field(ge=1)] | None = None
    add_special_tokens: bool = True
    shard_tokens: Annotated[Int, Field(ge=1)] = SHARD_TOKENS
    shard_bytes: Annotated[Int, Field(ge=1)] = SHARD_BYTES

    @model_validator(mode="after")
    def _fits(self) -> Self:
        select = self.capture.select
        if select is not None and "prompt" not in select.phases:
            raise spec_error("E_SELECTION", "capture.select", f"a harvest generates nothing: {select} selects no row")
        if self.across and not self.packed:
            raise spec_error("E_BAD_PARAM", "across", "is for packed documents; whole ones do not meet")
        if self.packed and self.too_long != "refuse":
            raise spec_error("E_BAD_PARAM", "too_long", "packed documents have any length: leave it out")
        if self.stride is not None and not self.packed and self.too_long != "split":
            raise spec_error("E_BAD_PARAM", "stride", "is for documents that are split or packed")
        if self.context is not None:
            self.check_stride(self.context, "stride")
        if self.pool == "mean" and self.capture.dtype in ("int32", "int64"):
            raise spec_error("E_BAD_PARAM", "pool", f"a mean is no {self.capture.dtype}: choose a floating type")
        return self

    def check_stride(self, context: int, path: str) -> None:
        """E_BAD_PARAM, at `path`, for a stride that is longer than a sequence of `context` tokens."""
        if self.stride is not None and self.stride > context:
            message = f"{self.stride} would leave out tokens between sequences of {context}"
            raise spec_error("E_BAD_PARAM", path, message)

    def canonical(self) -> dict[str, Any]:
        """The object as it is stored and compared."""
        return self.model_dump(mode="json", exclude_none=True) | {"capture": self.capture.canonical()}
