"""Segments: rows in files that two processes map, so that they are handed over without a copy or a message.

A segment has room for `capacity` rows of one set of tensors, each `[capacity, width]`. It is written by the process
that made it, read by others under its name, and used again once they have let go of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.errors import CaptureError
from midstream.core.sites import Site

from .pages import PAGES

Place = tuple[Site, int]
"""A site and a layer."""

ALIGNMENT: Final = 64
TARGET_BYTES: Final = 32 << 20
"""About how large a segment is."""


@dataclass(frozen=True)
class Column:
    """One tensor of a segment: of which place, how wide its rows are, and of what."""

    site: Site
    layer: int
    width: int
    dtype: torch.dtype

    @property
    def place(self) -> Place:
        """Its site and layer."""
        return (self.site, self.layer)

    @property
    def row_bytes(self) -> int:
        """How many bytes a row has."""
        return self.width * self.dtype.itemsize

    def plain(self) -> list[Any]:
        """The same as JSON has it."""
        return [self.site, self.layer, self.width, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Column:
        """A column from its JSON."""
        site, layer, width, dtype = plain
        return cls(site, layer, width, getattr(torch, dtype))


def capacity_of(columns: Sequence[Column]) -> int:
    """How many rows a segment of these columns has room for."""
    return max(1, TARGET_BYTES // max(1, sum(column.row_bytes for column in columns)))


def mapped(file: Path, columns: Sequence[Column], capacity: int) -> dict[Place, Tensor]:
    """The tensors of the segment in `file`, which is made where it is missing; none of them an inference tensor."""
    size = _offsets(columns, capacity)[-1]
    with torch.inference_mode(False):
        storage = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        found: dict[Place, Tensor] = {}
        for column, start in zip(columns, _offsets(columns, capacity), strict=False):
            flat = storage[start : start + capacity * column.row_bytes].view(column.dtype)
            found[column.place] = flat.view(capacity, column.width)
    return found


def _offsets(columns: Sequence[Column], capacity: int) -> list[int]:
    """Where each column begins, in bytes, and the size of the whole."""
    starts = [0]
    for column in columns:
        end = starts[-1] + capacity * column.row_bytes
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
    starts[-1] = max(starts[-1], 1)
    return starts


@dataclass(eq=False)
class Segment:
    """Room for rows. used: how many of them are given away."""

    number: int
    file: Path
    columns: tuple[Column, ...]
    capacity: int
    tensors: Mapping[Place, Tensor]
    used: int = 0

    @property
    def nbytes(self) -> int:
        """The size of its file."""
        return _offsets(self.columns, self.capacity)[-1]

    @property
    def left(self) -> int:
        """How many more rows it has room for."""
        return self.capacity - self.used

    def plain(self) -> dict[str, Any]:
        """What a reader must know to map it."""
        columns = [column.plain() for column in self.columns]
        names = {"number": self.number, "file": self.file.name, "capacity": self.capacity, "nbytes": self.nbytes}
        return names | {"columns": columns}


class Segments:
    """The segments in one folder, at most `max_bytes` of them together."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._made = 0
        self._bytes = 0
        self._in_use: dict[int, Segment] = {}
        self._free: list[Segment] = []

    def __getitem__(self, number: int) -> Segment:
        return self._in_use[number]

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return self._bytes

    @property
    def in_use(self) -> list[int]:
        """The numbers of those that hold rows."""
        return sorted(self._in_use)

    def new(self, columns: Sequence[Column]) -> Segment:
        """An empty segment; CaptureError when there is no room for another."""
        columns = tuple(columns)
        capacity = capacity_of(columns)
        fitting = next((one for one in self._free if (one.columns, one.capacity) == (columns, capacity)), None)
        if fitting is not None:  # its memory is there already, page by page
            self._free.remove(fitting)
            self._made += 1
            again = Segment(self._made, fitting.file, columns, capacity, fitting.tensors)
            self._in_use[again.number] = again
            return again
        size = _offsets(columns, capacity)[-1]
        while self._free and self._bytes + size > self.max_bytes:
            self._remove(self._free.pop(0))
        if self._bytes + size > self.max_bytes:
            message = f"{self._bytes:,} bytes of rows wait to be read, of at most {self.max_bytes:,}"
            raise CaptureError(f"{message}: read them, capture fewer rows, or give more with row_bytes")
        if size > (free := disk_usage(self.folder).free):
            message = f"{size:,} bytes of rows would go to {self.folder}, which has {free:,} left"
            raise CaptureError(f"{message}: read what waits there, or capture fewer rows")
        self._made += 1
        file = self.folder / f"{self._made}.rows"
        segment = Segment(self._made, file, columns, capacity, mapped(file, columns, capacity))
        self._bytes += segment.nbytes
        self._in_use[segment.number] = segment
        return segment

    def rows(self, segment: NDArray[np.int64], row: NDArray[np.int64], places: Sequence[Place]) -> Tensor:
        """Rows by segment and place in it, `[rows]` each, of some places: a copy, `[rows, places, width]`."""
        numbers = np.unique(segment).tolist()
        width, dtype = next((one.width, one.dtype) for one in self[numbers[0]].columns if one.place == places[0])
        out = PAGES.tensor((len(row), len(places), width), dtype)
        for number in numbers:
            found = np.flatnonzero(segment == number)
            at, mine = torch.as_tensor(found), torch.as_tensor(row[found])
            for column, place in enumerate(places):
                out[at, column] = self[number].tensors[place][mine]
        return out

    def free(self, number: int) -> None:
        """Nobody reads a segment any more."""
        segment = self._in_use.pop(number, None)
        if segment is not None:
            self._free.append(segment)

    def clear(self) -> None:
        """Remove every file."""
        for segment in [*self._in_use.values(), *self._free]:
            self._remove(segment)
        self._in_use.clear()
        self._free.clear()

    def _remove(self, segment: Segment) -> None:
        self._bytes -= segment.nbytes
        segment.file.unlink(missing_ok=True)
