"""Captured rows on their way out: segments in this process's own memory, and one request's rows out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from midstream.core.capture import CaptureReceipt
from midstream.core.select import SelectSpec
from midstream.core.sites import Site
from midstream.formats.activations import Activations, Stack
from midstream.taps.pages import PAGES
from midstream.taps.segments import ALIGNMENT, TARGET_BYTES, Column, Place, Segment, Segments
from midstream.taps.step import StepBatch, check_rows
from midstream.taps.storage import copy_rows
from midstream.taps.stream import index_of
from midstream.taps.tape import Taken

_CPU = torch.device("cpu")


class OwnSegments(Segments):
    """Segments that no other process reads, each of about a quarter of `row_bytes` at most."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(Path(), row_bytes)
        self._target = min(TARGET_BYTES, row_bytes // 4)

    def new(self, columns: Sequence[Column]) -> Segment:
        """An empty segment; whether there is room is for whoever lets requests in."""
        columns = tuple(columns)
        capacity = max(1, self._target // max(1, sum(column.row_bytes for column in columns)))
        self._made += 1
        segment = Segment(self._made, Path(), columns, capacity, _tensors(columns, capacity))
        self._bytes += segment.nbytes
        self._in_use[segment.number] = segment
        return segment

    def free(self, number: int) -> None:
        """Nobody reads a segment any more."""
        self._bytes -= self._in_use.pop(number).nbytes


def _tensors(columns: Sequence[Column], capacity: int) -> dict[Place, Tensor]:
    """Of one piece of memory; none of them an inference tensor."""
    sizes = [-(-capacity * column.row_bytes // ALIGNMENT) * ALIGNMENT for column in columns]
    with torch.inference_mode(False):
        parts = PAGES.tensor((sum(sizes),), torch.uint8).split(sizes)
        return {
            column.place: part[: capacity * column.row_bytes].view(column.dtype).view(capacity, column.width)
            for column, part in zip(columns, parts, strict=True)
        }


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a request that has ended, where they were put down. reader: the name under which they are held.

    sequence: every row that it had.
    """

    reader: str
    taken: Taken
    segments: Mapping[int, Segment]
    columns: tuple[Column, ...]
    sequence: StepBatch

    def check(self, select: SelectSpec | None) -> None:
        """CaptureError: a row that was selected did not come, or consumed another token than its label says."""
        check_rows(self.taken.position, self.taken.token_id, self.sequence, select)

    def activations(self) -> Activations:
        """A copy of them, layers that differ in width or type apart; takes a while, and may be called in a thread."""
        position = self.taken.position
        alike: dict[tuple[Site, int, torch.dtype], list[Column]] = {}
        for column in self.columns:
            alike.setdefault((column.site, column.width, column.dtype), []).append(column)
        stacks = [
            Stack(site, tuple(column.layer for column in of), self._stacked(of, width, dtype))
            for (site, width, dtype), of in alike.items()
        ]
        receipt = CaptureReceipt(len(position), len(position), 0, int(self.taken.overflowed.sum()))
        generated = position >= self.sequence.prompt_len[0]
        return Activations(stacks, position, self.taken.token_id, generated, receipt)

    def _stacked(self, columns: Sequence[Column], width: int, dtype: torch.dtype) -> Tensor:
        """The rows of some layers, `[layers, rows, width]`."""
        out = PAGES.tensor((len(columns), len(self.taken.position), width), dtype)
        for number, segment in self.segments.items():
            here = np.flatnonzero(self.taken.segment == number)
            target, source = index_of(here, _CPU), index_of(self.taken.row[here], _CPU)
            for place, column in enumerate(columns):
                rows = segment.tensors[column.place]
                if isinstance(target, slice) and isinstance(source, slice):
                    copy_rows(out[place, target], rows[source])
                else:
                    out[place, target] = rows[source]
        return out
