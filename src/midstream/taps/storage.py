"""Rows in their storage type, and what that could not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")


@dataclass(frozen=True)
class Stored:
    """Rows `[rows, width]` as they are stored; None where the type makes no such row.

    bad: bool `[rows]`, rows that an integer type cannot hold, which are zero. over: int32 `[rows]`, how many values
    became infinite in float16.
    """

    rows: Tensor
    bad: Tensor | None = None
    over: Tensor | None = None


def stored(picked: Tensor, dtype: torch.dtype) -> Stored:
    """`picked` in a storage type, on its device; integers truncate towards zero.

    >>> made = stored(torch.tensor([[1.7], [float("nan")]]), torch.int32)
    >>> made.rows.tolist(), made.bad.tolist()
    ([[1], [0]], [False, True])
    """
    bad = over = None
    if not dtype.is_floating_point:
        bound = 2.0 ** (31 if dtype == torch.int32 else 63)
        wide = picked.float() if picked.itemsize < 4 else picked  # float16 cannot hold the bound
        bad = ~((wide >= -bound) & (wide < bound)).all(1)  # NaN compares false
        picked = torch.where(bad[:, None], 0, picked)
    cast = picked.to(dtype)
    if dtype == torch.float16:
        over = (cast.isinf() & picked.isfinite()).sum(1, dtype=torch.int32)
    return Stored(cast, bad, over)


def counts_of(kept: dict[Key, Tensor], key: Key, rows: int, dtype: torch.dtype) -> Tensor:
    """What is kept under a key of each of `rows` rows, `[rows]`: zeros, the first time."""
    if key not in kept:
        kept[key] = torch.zeros(rows, dtype=dtype)
    return kept[key]
