"""One request inside the engine, and what it is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from midstream.backends.serving import Grown
from midstream.core.binding import BoundOp
from midstream.core.errors import MidstreamError
from midstream.core.generation import FinishReason, TokenLogprob
from midstream.core.interventions import OpReceipt
from midstream.core.select import SelectSpec
from midstream.taps.segments import Column

from ..choosing import Growing, Stopping, Way
from .rows import Rows


@dataclass(frozen=True)
class Keeping:
    """What is kept of a request's rows. row_bytes: of all columns of one row; rows: at most so many."""

    columns: tuple[Column, ...]
    select: SelectSpec | None
    row_bytes: int
    rows: int

    @property
    def nbytes(self) -> int:
        """What its rows take at most."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, eq=False)
class Finished:
    """A sequence has ended; rows: where what was captured lies, until the engine is told to release it."""

    finish_reason: FinishReason
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    steering: tuple[OpReceipt, ...]
    rows: Rows | None


Event = Grown | Finished | MidstreamError
"""What a request is told; after one of the latter two there is nothing more."""


@dataclass(eq=False)
class Served(Growing):
    """One sequence. `request` is its number among those that run.

    prompt_len: how many of the prompt's tokens are prompt to selections and scopes; a reference after them is not.
    past: whether it is past the model's rotary boundary, see forward.rotary_boundary. table: with whom it shares
    passes, once it runs: those of one `past`, see line.table_for. way: once its prompt has run. reader: the name under
    which its rows are held, once it has ended.
    """

    prompt_len: int = field(kw_only=True)
    stopping: Stopping = field(kw_only=True)
    ops: tuple[BoundOp, ...] = field(kw_only=True)
    keeping: Keeping | None = field(kw_only=True)
    past: bool = field(kw_only=True)
    table: tuple[bool, int] = (False, 0)
    way: Way | None = None
    reader: str | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue[Any])

    @property
    def tapped(self) -> bool:
        """Whether taps have anything to do with it."""
        return bool(self.ops) or self.keeping is not None

    @property
    def gated(self) -> bool:
        """Whether some op waits for what its prompt's rows decide."""
        return any(bound.op.gate is not None for bound in self.ops)

    @property
    def reach(self) -> int:
        """How many tokens it may come to hold in the cache."""
        return len(self.prompt) + self.stopping.params.max_tokens - 1

    @property
    def consumed(self) -> int:
        """How many positions have run, once its prompt has."""
        return len(self.prompt) + max(len(self.token_ids) - 1, 0)
