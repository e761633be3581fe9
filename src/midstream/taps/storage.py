"""Rows in their storage type, and what that could not hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

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


_ALONE: Final = 1 << 20
"""Bytes up to which one thread is faster than several: on cores that others use too, they wait for one another."""


def copy_rows(out: Tensor, rows: Tensor) -> None:
    """`out[:] = rows`, both `[rows, width]` of one type on the CPU, each row in one piece.

    >>> out = torch.zeros(2, 3, dtype=torch.bfloat16)
    >>> copy_rows(out[:1], torch.ones(1, 3, dtype=torch.bfloat16))
    >>> out.sum().item()
    3.0
    """
    if rows.nbytes > _ALONE or out.dtype != rows.dtype or rows.stride(-1) != 1 or out.stride(-1) != 1:
        out.copy_(rows)
    else:  # NumPy has no bfloat16, and bytes are bytes
        out.view(torch.uint8).numpy()[...] = rows.view(torch.uint8).numpy()
