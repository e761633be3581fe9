"""Tape: the selected rows of passes whose requests come and go, into segments that another process reads.

A Recorder knows its requests from the start, and gives each row its place in the result. An engine that serves does
not: its rows are put down in the order in which they come, and what each of them is stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from midstream.core.errors import CaptureError, MidstreamError
from midstream.core.select import SelectSpec

from .segments import Column, Place, Segment, Segments
from .step import Ints, StepBatch, check_fired, resolve_each
from .storage import counts_of, stored
from .stream import Index, Stream, index_of
from .stretches import Stretches

_ROW_BITS: Final = 24  # a row's number in its segment; the bits above are the segment's
_NOWHERE: Final = -1


@dataclass(frozen=True)
class Taping:
    """What one request wants kept: which columns of the rows that `select` names, from position `first` on.

    length: a bound on its positions (prompt + max_tokens).
    """

    columns: tuple[Column, ...]
    select: SelectSpec | None
    length: int
    first: int = 0


@dataclass(frozen=True)
class Taken:
    """Where the rows of one request are, `[rows]` each, by position; counts of values that overflowed float16."""

    position: Ints
    token_id: Ints
    segment: Ints
    row: Ints
    overflowed: Ints


@dataclass(eq=False)
class _Group:
    """Requests with the same columns, and the segment that their next rows go to."""

    columns: tuple[Column, ...]
    number: int
    members: int = 0
    segment: Segment | None = None


@dataclass(frozen=True)
class _Part:
    """Rows of a pass that go to one segment."""

    segment: Segment
    source: Index
    target: Index
    requests: Ints


@dataclass
class _Pass:
    """The forward pass under way, and the copies from a GPU that are on their way."""

    size: int
    parts: dict[Place, list[_Part]] = field(default_factory=dict[Place, list[_Part]])
    fired: set[Place] = field(default_factory=set[Place])
    pending: list[tuple[Tensor, Index, Tensor]] = field(default_factory=list[tuple[Tensor, Index, Tensor]])


class Tape:
    """Keeps rows for requests under any index that no running request has (`StepBatch.request`).

    A row that is computed again is put where it was before.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._tapings: dict[int, Taping] = {}
        self._groups: dict[tuple[Column, ...], _Group] = {}  # in the order of their numbers in `_group_of`
        self._stretches = Stretches()
        self._slots = np.full(0, _NOWHERE, dtype=np.int64)
        self._tokens = np.zeros(0, dtype=np.int64)
        self._first = np.zeros(64, dtype=np.int64)
        self._group_of = np.full(64, -1, dtype=np.int64)
        self._select_of = np.zeros(64, dtype=np.int64)
        self._selects: dict[SelectSpec | None, int] = {}
        # segment → who has rows in it: requests that run, and under a name, those whose rows are being read
        self._holders: dict[int, set[int | str]] = {}
        self._overflowed: dict[int, Tensor] = {}
        self._unstorable: dict[int, Tensor] = {}
        self._now: _Pass | None = None
        self._unsettled: tuple[_Pass, torch.cuda.Event] | None = None
        self.failures: dict[int, MidstreamError] = {}

    # --- requests

    def admit(self, request: int, taping: Taping) -> None:
        """A request begins."""
        if request >= len(self._first):
            self._grow_requests(request + 1)
        self._stretches.admit(request, taping.length)
        if self._stretches.size > len(self._slots):
            more = np.full(max(self._stretches.size, 2 * len(self._slots)) - len(self._slots), _NOWHERE, dtype=np.int64)
            self._slots = np.concatenate([self._slots, more])
            self._tokens = np.concatenate([self._tokens, np.zeros_like(more)])
        self._slots[self._stretches.of(request, taping.length)] = _NOWHERE
        group = self._groups.setdefault(taping.columns, _Group(taping.columns, len(self._groups)))
        group.members += 1
        self._tapings[request] = taping
        self._first[request] = taping.first
        self._group_of[request] = group.number
        self._select_of[request] = self._selects.setdefault(taping.select, len(self._selects))

    def _grow_requests(self, count: int) -> None:
        more = max(count, 2 * len(self._first)) - len(self._first)
        self._first = np.concatenate([self._first, np.zeros(more, dtype=np.int64)])
        self._group_of = np.concatenate([self._group_of, np.full(more, -1)])
        self._select_of = np.concatenate([self._select_of, np.zeros(more, dtype=np.int64)])

    def taken(self, request: int) -> Taken:
        """Where a request's rows are."""
        self.settle()
        taping = self._tapings[request]
        mine = self._stretches.of(request, taping.length)
        slots = self._slots[mine]
        position = np.flatnonzero(slots != _NOWHERE)
        slot = slots[position]
        segment, row = slot >> _ROW_BITS, slot & ((1 << _ROW_BITS) - 1)
        overflowed = np.zeros(len(slot), dtype=np.int64)
        for number in np.unique(segment):
            of = segment == number
            if int(number) in self._overflowed:
                overflowed[of] = self._overflowed[int(number)][torch.as_tensor(row[of])].numpy()
            if int(number) in self._unstorable and self._unstorable[int(number)][torch.as_tensor(row[of])].any():
                kind = str(taping.columns[0].dtype).removeprefix("torch.")
                self.failures[request] = CaptureError(f"has values that are not finite or too large for {kind}")
        return Taken(position, self._tokens[mine][position], segment, row, overflowed)

    def dismiss(self, request: int, reader: str | None = None) -> None:
        """A request has ended. Its rows stay until `release(reader)`; without a reader they are forgotten."""
        taping = self._tapings.pop(request)
        self.failures.pop(request, None)
        self._stretches.dismiss(request)
        self._group_of[request] = -1
        self._groups[taping.columns].members -= 1
        for holders in self._holders.values():
            if request in holders:
                holders.discard(request)
                if reader is not None:
                    holders.add(reader)
        self._free_unheld()
        if not self._tapings:  # what no request asks for any more is not kept in mind
            self._selects.clear()

    def release(self, reader: str) -> None:
        """A reader has let go of a request's rows: a segment is used again when nobody has rows in it."""
        for holders in self._holders.values():
            holders.discard(reader)
        self._free_unheld()

    def _free_unheld(self) -> None:
        for group in self._groups.values():  # written from its beginning again
            if group.segment is not None and not self._holders[group.segment.number] and not group.members:
                group.segment = None
        open_ = {group.segment.number for group in self._groups.values() if group.segment is not None}
        for number in [number for number, holders in self._holders.items() if not holders and number not in open_]:
            del self._holders[number]
            self._overflowed.pop(number, None)
            self._unstorable.pop(number, None)
            self._segments.free(number)

    # --- one forward pass

    @property
    def places(self) -> set[Place]:
        """The sites and layers of which this pass keeps rows."""
        return set() if self._now is None else set(self._now.parts)

    def begin(self, step: StepBatch, device: torch.device) -> None:
        """Resolve, once for all layers, which rows of this pass are kept and where they go."""
        self._now = _Pass(step.size)
        if len(step) and int(step.request.max()) >= len(self._first):
            self._grow_requests(int(step.request.max()) + 1)
        group_of, groups = self._group_of[step.request], list(self._groups.values())
        for group in np.unique(group_of):
            if group < 0:
                continue
            rows = step.take(group_of == group)
            selected = resolve_each(list(self._selects), self._select_of[rows.request], rows)
            rows = rows.take(selected & (rows.position >= self._first[rows.request]))
            if len(rows):
                try:
                    self._plan(groups[int(group)], rows, device)
                except CaptureError as error:
                    self.failures.update(dict.fromkeys(np.unique(rows.request).tolist(), error))

    def _plan(self, group: _Group, rows: StepBatch, device: torch.device) -> None:
        """Give each row a slot, and note which go to which segment."""
        at = self._stretches.at(rows.request, rows.position)
        slot = self._slots[at]
        new = np.flatnonzero(slot == _NOWHERE)
        done = 0
        while done < len(new):
            if group.segment is None or not group.segment.left:
                group.segment = self._segments.new(group.columns)
                self._holders[group.segment.number] = set()
            segment = group.segment
            count = min(segment.left, len(new) - done)
            slot[new[done : done + count]] = (segment.number << _ROW_BITS) + segment.used + np.arange(count)
            segment.used += count
            done += count
        self._forget_counts(self._slots[at][slot == self._slots[at]])
        self._slots[at] = slot
        self._tokens[at] = rows.token_id
        numbers = slot >> _ROW_BITS
        assert self._now is not None
        for number in np.unique(numbers):
            of = numbers == number
            segment = self._segments[int(number)]
            self._holders[segment.number].update(np.unique(rows.request[of]).tolist())
            source = index_of(rows.row[of], device)
            target = index_of(slot[of] & ((1 << _ROW_BITS) - 1), torch.device("cpu"))
            part = _Part(segment, source, target, rows.request[of])
            for column in group.columns:
                self._now.parts.setdefault(column.place, []).append(part)

    def _forget_counts(self, slots: Ints) -> None:
        """Rows that are computed again are counted again."""
        for number in np.unique(slots >> _ROW_BITS):
            rows = torch.as_tensor(slots[slots >> _ROW_BITS == number] & ((1 << _ROW_BITS) - 1))
            for counts in (self._overflowed, self._unstorable):
                if int(number) in counts:
                    counts[int(number)][rows] = 0

    def record(self, place: Place, stream: Stream) -> None:
        """Keep this pass's rows of what stands in `stream` at a place."""
        now = self._now
        if now is None:
            raise CaptureError(f"{place[0]} at layer {place[1]} fired outside a pass")
        check_fired(now.fired, place, stream.size, now.size)
        for part in now.parts.get(place, ()):
            out = part.segment.tensors[place]
            if out.dtype == stream.dtype and out.device == stream.device and isinstance(part.target, slice):
                stream.copy(part.source, out[part.target])
                continue
            picked = stream.take(part.source)
            if picked.shape[1] != out.shape[1]:
                raise CaptureError(f"{place[0]} at layer {place[1]} is {picked.shape[1]} wide, not {out.shape[1]}")
            self._keep(now, part, out, picked if out.dtype == picked.dtype else self._cast(part, out, picked))

    def _cast(self, part: _Part, out: Tensor, picked: Tensor) -> Tensor:
        """To the storage type, on the device; what it cannot hold is counted, or fails its own request."""
        number, rows = part.segment.number, part.segment.capacity
        made = stored(picked, out.dtype)
        if made.bad is not None:
            self._merge(part, counts_of(self._unstorable, number, rows, torch.bool), made.bad)
        if made.over is not None:
            self._merge(part, counts_of(self._overflowed, number, rows, torch.int32), made.over)
        return made.rows

    def _merge(self, part: _Part, out: Tensor, found: Tensor) -> None:
        """Add to what other layers found of the same rows."""
        found = found.cpu()
        out[part.target] = out[part.target] | found if out.dtype == torch.bool else out[part.target] + found

    def _keep(self, now: _Pass, part: _Part, out: Tensor, values: Tensor) -> None:
        if values.is_cuda:
            now.pending.append((out, part.target, values.to("cpu", non_blocking=True)))  # lands in pinned memory
        else:
            out[part.target] = values

    def end(self) -> None:
        """Close the pass; the requests of a place that did not fire have failed."""
        now, self._now = self._now, None
        if now is None:
            return
        for place in sorted(set(now.parts) - now.fired):
            message = f"{place[0]} at layer {place[1]} did not fire: the rows of this pass are lost"
            for part in now.parts[place]:
                self.failures.update(dict.fromkeys(np.unique(part.requests).tolist(), CaptureError(message)))
        self.settle()
        if now.pending:
            event = torch.cuda.Event()
            event.record()
            self._unsettled = (now, event)

    def settle(self) -> None:
        """Wait for the copies of the pass before, and put its rows in their place."""
        if self._unsettled is not None:
            now, event = self._unsettled
            self._unsettled = None
            event.synchronize()
            for out, target, values in now.pending:
                out[target] = values
