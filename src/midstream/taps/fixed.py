"""Taps of a recorded graph: work on the device alone, on buffers that never move.

A graph that was recorded is replayed without Python, on the addresses that it was recorded with. What a pass wants is
written into these buffers before the replay, and what it left is read from them after it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from midstream.core.errors import CaptureError
from midstream.core.op import Op
from midstream.core.ops import Add

from .step import Ints


def plain_add(op: Op) -> bool:
    """Whether an op adds the same to a row whatever the row is, so that it can be written down before the pass."""
    return isinstance(op, Add) and not (op.norm_match or op.cap_norm or op.only_aligned or op.gate or op.silent)


class FixedTaps:
    """Reads up to `rows` rows of each pass at each of its places, and adds to them. widths: place → that of its rows.

    >>> taps = FixedTaps({7: 2}, rows=3, dtype=torch.float32, device=torch.device("cpu"))
    >>> import numpy as np
    >>> taps.fill(np.array([1]), {7: torch.tensor([[10.0, 0.0]])})
    >>> hidden = torch.ones(4, 2)
    >>> taps.at(7, hidden, None)                       # what a graph records, and replays
    >>> taps.left(7).tolist(), hidden.tolist()
    ([[11.0, 1.0]], [[1.0, 1.0], [11.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    """

    def __init__(self, widths: Mapping[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.places = tuple(widths)
        self._read = torch.zeros(rows, dtype=torch.int64, device=device)
        # x + (−0.0) is x, bit for bit; −0.0 + 0.0 is not
        self._added = {
            place: torch.full((rows, width), -0.0, dtype=dtype, device=device) for place, width in widths.items()
        }
        self._left = {place: torch.zeros_like(added) for place, added in self._added.items()}
        self._dirty: dict[int, int] = {}
        self._count = 0

    @property
    def buffers(self) -> list[Tensor]:
        """Everything that a graph was recorded on."""
        return [self._read, *self._added.values(), *self._left.values()]

    def fill(self, read: Ints, added: Mapping[int, Tensor]) -> None:
        """Before a pass: which flat rows it reads, `[n]`; place → what is added to each of them, `[n, width]`.

        Rows past n are row 0, to which nothing is added, and what they leave is not looked at. CaptureError: too many.
        """
        count = len(read)
        if count > self.rows:
            raise CaptureError(f"{count} rows, and a recorded graph reads {self.rows}")
        index = torch.zeros(self.rows, dtype=torch.int64)
        index[:count] = torch.as_tensor(read)
        self._read.copy_(index.pin_memory() if self._read.is_cuda else index, non_blocking=True)
        for place, before in self._dirty.items():
            self._added[place][:before].fill_(-0.0)
        for place, rows in added.items():
            self._added[place][:count].copy_(rows, non_blocking=True)
        self._dirty = dict.fromkeys(added, count)
        self._count = count

    @property
    def idle(self) -> bool:
        """Whether the next pass reads nothing, and adds nothing."""
        return not self._count

    def at(self, place: int, delta: Tensor, residual: Tensor | None) -> None:
        """The work at a place: add to the rows that are read, then read them. delta, residual: `[…, size, width]`."""
        left = self._left[place]
        rows = delta.view(-1, delta.shape[-1])
        rows.index_add_(0, self._read, self._added[place])
        torch.index_select(rows, 0, self._read, out=left)
        if residual is not None:
            left.add_(residual.view(-1, residual.shape[-1]).index_select(0, self._read))

    def forget(self) -> None:
        """Let what was left be NaN, so that a pass that leaves nothing is seen."""
        for rows in self._left.values():
            rows.fill_(torch.nan)

    def left(self, place: int) -> Tensor:
        """What the pass left of the rows that it read, `[n, width]`: a view, good until the next pass."""
        return self._left[place][: self._count]

    def added(self, place: int) -> Tensor:
        """What was added to them, `[n, width]`: a view, likewise."""
        return self._added[place][: self._count]
