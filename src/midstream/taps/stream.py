"""Stream: the flat rows that stand at a tap, whatever an engine holds them in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = Tensor | slice
"""Which flat rows: int64 `[rows]` on the rows' device, or a run of them."""


class Stream(Protocol):
    """The rows of one pass at one site and layer, `[size, width]`."""

    @property
    def size(self) -> int:
        """How many flat rows there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they are."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What a row is made of."""
        ...

    def take(self, index: Index) -> Tensor:
        """Some rows, `[rows, width]`, in their dtype; what a later `put` does to them is not seen in it.

        With a slice it may be a view of the engine's own memory: read it at once, and never keep it.
        """
        ...

    def copy(self, index: Index, out: Tensor) -> None:
        """Write some rows to `out` `[rows, width]`, of the same device and dtype."""
        ...

    def put(self, index: Index, rows: Tensor) -> None:
        """Let `rows` `[rows, width]` stand in the place of some rows."""
        ...


class Copied:
    """A tensor `[..., width]`, whose leading axes are the rows, that is copied before anything is changed.

    >>> stream = Copied(torch.zeros(2, 3))
    >>> stream.changed is None
    True
    >>> stream.put(slice(0, 1), torch.ones(1, 3))
    >>> stream.changed.sum(-1).tolist(), stream.values.sum().item()
    ([3.0, 0.0], 0.0)
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._rows = values.reshape(-1, values.shape[-1])
        self._copied = False

    @property
    def size(self) -> int:
        """How many flat rows there are."""
        return len(self._rows)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._rows.device

    @property
    def dtype(self) -> torch.dtype:
        """What a row is made of."""
        return self._rows.dtype

    @property
    def changed(self) -> Tensor | None:
        """The tensor that shall stand in the place of `values`; None where nothing was changed."""
        return self._rows.reshape(self.values.shape) if self._copied else None

    def take(self, index: Index) -> Tensor:
        """Some rows."""
        return self._rows[index]

    def copy(self, index: Index, out: Tensor) -> None:
        """Write some rows to `out`."""
        _copy(self._rows, index, out)

    def put(self, index: Index, rows: Tensor) -> None:
        """Change some rows, of a copy."""
        if not self._copied:
            self._rows, self._copied = self._rows.clone(), True
        self._rows[index] = rows


class Fused:
    """A residual that an engine keeps in two parts, `delta + residual` `[size, width]`, changed where it lies.

    residual None: the one tensor is the whole. A row that is changed stands in delta, and its residual is zero.
    """

    def __init__(self, delta: Tensor, residual: Tensor | None = None) -> None:
        self._delta, self._residual = delta, residual

    @property
    def size(self) -> int:
        """How many flat rows there are."""
        return len(self._delta)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._delta.device

    @property
    def dtype(self) -> torch.dtype:
        """What a row is made of."""
        return self._delta.dtype

    def take(self, index: Index) -> Tensor:
        """Some rows: both parts, selected first and added then."""
        if self._residual is None:
            return self._delta[index]
        return self._delta[index] + self._residual[index]

    def copy(self, index: Index, out: Tensor) -> None:
        """Write the sum of both parts of some rows to `out`."""
        if self._residual is None:
            _copy(self._delta, index, out)
        else:
            torch.add(self._delta[index], self._residual[index], out=out)

    def put(self, index: Index, rows: Tensor) -> None:
        """Change some rows in place."""
        self._delta[index] = rows
        if self._residual is not None:
            self._residual[index] = 0


def _copy(rows: Tensor, index: Index, out: Tensor) -> None:
    if isinstance(index, slice):
        out.copy_(rows[index])
    else:
        torch.index_select(rows, 0, index, out=out)


def index_of(rows: NDArray[np.int64], device: torch.device) -> Index:
    """Row numbers as a slice where they are one run (a plain copy), else as an index on the device.

    >>> index_of(np.array([3, 4, 5]), torch.device("cpu"))
    slice(3, 6, None)
    """
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    index = torch.as_tensor(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index
