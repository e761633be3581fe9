"""One request's rows, from the segments in which workers put them down into one tensor for each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.core.sites import Site, SiteLayout
from midstream.formats.activations import Stack
from midstream.taps.pages import PAGES
from midstream.taps.storage import copy_rows
from midstream.taps.stream import Index, index_of

from ..rows import Collected, Segmented

_CPU = torch.device("cpu")
_Where = tuple[Site, int]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of one place in one segment of one rank. target: their places in the result."""

    rank: int
    target: Index
    source: Index
    tensor: Tensor


def gathered(
    parts: Sequence[Collected],
    kept: np.ndarray[Any, np.dtype[np.bool_]],
    segmented: Segmented,
    layouts: Mapping[Site, Mapping[int, SiteLayout]],
    dtype: torch.dtype,
) -> list[Stack]:
    """A request's kept lines as tensors `[layers, rows, width]`, layers that differ in width or type apart.

    parts: of every rank, whose parts of a row come side by side. layouts: what was asked for. dtype: where there is no
    row to tell it by.
    """
    lines = np.flatnonzero(kept)
    pieces: dict[_Where, list[_Piece]] = {}
    for rank, part in enumerate(parts):
        for plain in part.segments:
            target = np.flatnonzero(part.segment[lines] == plain["number"])
            if not len(target):
                continue
            to, source = index_of(target, _CPU), index_of(part.row[lines[target]], _CPU)
            for place, tensor in segmented.tensors(rank, plain).items():
                pieces.setdefault(place, []).append(_Piece(rank, to, source, tensor))
    found: list[Stack] = []
    for site, layers in layouts.items():
        alike: dict[tuple[int, torch.dtype], list[int]] = {}
        for layer, layout in layers.items():
            of = pieces.get((site, layer))
            alike.setdefault((layout.width, of[0].tensor.dtype if of else dtype), []).append(layer)
        for (width, kind), of in alike.items():
            out = PAGES.tensor((len(of), len(lines), width), kind)
            for place, layer in enumerate(of):
                _fill(out[place], pieces.get((site, layer), ()))
            found.append(Stack(site, tuple(of), out))
    return found


def _fill(out: Tensor, pieces: Sequence[_Piece]) -> None:
    """Put the rows of one place where they belong, each rank's columns after those of the ranks before."""
    widths: dict[int, int] = {piece.rank: piece.tensor.shape[1] for piece in pieces}
    starts = {rank: sum(width for other, width in widths.items() if other < rank) for rank in widths}
    for piece in pieces:
        start = starts[piece.rank]
        columns = out[:, start : start + piece.tensor.shape[1]]
        if isinstance(piece.target, slice) and isinstance(piece.source, slice):
            copy_rows(columns[piece.target], piece.tensor[piece.source])
        else:
            columns[piece.target] = piece.tensor[piece.source]
