"""Caches whose rows come and go. Rows are padded on the left, so that all end in the same, the last column.

Of `columns` columns a plain layer keeps all, and one with a sliding window the last window − 1, beside a count of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def join(cache: Any, other: Any, columns: int) -> None:
    """Put `other`'s rows after those of `cache`; both have `columns` columns then, and none had more before."""
    for layer, more in zip(cache.layers, other.layers, strict=True):
        if layer.is_initialized:  # else it shares another's keys
            kept = _kept(layer, columns)
            layer.keys, layer.values = (
                _stacked(one, two, kept) for one, two in ((layer.keys, more.keys), (layer.values, more.values))
            )
            _count(layer, columns)


def keep(cache: Any, rows: Sequence[int] | None, columns: int) -> None:
    """Only some rows (None: all), and only the last `columns` columns."""
    for layer in cache.layers:
        if layer.is_initialized:
            first = layer.keys.shape[2] - _kept(layer, columns)
            at = slice(None) if rows is None else torch.tensor(rows, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[at, :, first:], layer.values[at, :, first:]
            _count(layer, columns)


def _kept(layer: Any, columns: int) -> int:
    return min(columns, layer.sliding_window - 1) if layer.is_sliding else columns


def _count(layer: Any, columns: int) -> None:
    if layer.is_sliding:
        layer.cumulative_length = columns


def _stacked(first: Tensor, second: Tensor, width: int) -> Tensor:
    """Both, `[rows, heads, columns, size]`, one below the other, with zeros to the left of the narrower."""
    out = first.new_empty((len(first) + len(second), first.shape[1], width, first.shape[3]))
    for part, place in ((first, out[: len(first)]), (second, out[len(first) :])):
        padding = width - part.shape[2]
        place[:, :, :padding] = 0
        place[:, :, padding:] = part
    return out
