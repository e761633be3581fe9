"""StepBatch: what the rows of one forward pass are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.core.errors import CaptureError
from midstream.core.select import SelectSpec, resolve
from midstream.core.sites import Site

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """The owned rows of one forward pass over `size` flat rows, in the order in which modules see them.

    Every array is int64 `[owned]`. row: which flat row; rows of padding are owned by nobody and not listed, a
    prefix that several requests share is listed once for each. request: the owner. position: absolute, 0-based.
    token_id: the token consumed. prompt_len: how many of the owner's positions are prompt, so that phase is data.
    again: bool, rows that were computed before (an engine that preempts computes them twice); None: there is none.
    """

    size: int
    row: Ints
    request: Ints
    position: Ints
    token_id: Ints
    prompt_len: Ints
    again: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        columns = [self.row, self.request, self.position, self.token_id, self.prompt_len]
        lengths = [len(column) for column in columns] + ([] if self.again is None else [len(self.again)])
        if len(set(lengths)) != 1:
            raise ValueError(f"columns of different lengths: {lengths}")

    def __len__(self) -> int:
        return len(self.row)

    def take(self, owned: NDArray[np.int64] | NDArray[np.bool_]) -> StepBatch:
        """Some of the owned rows, by index or mask."""
        columns = (self.row, self.request, self.position, self.token_id, self.prompt_len)
        again = None if self.again is None else self.again[owned]
        return StepBatch(self.size, *(column[owned] for column in columns), again=again)


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one request in one pass: its first flat row, first position, and the ids consumed."""

    request: int
    row: int
    position: int
    token_ids: Sequence[int]
    prompt_len: int


def step_of(runs: Sequence[Run], size: int) -> StepBatch:
    """The StepBatch of a pass over `size` flat rows that is made of runs.

    >>> step_of([Run(request=3, row=8, position=0, token_ids=[5, 6], prompt_len=2)], size=16).row.tolist()
    [8, 9]
    """
    counts = np.array([len(run.token_ids) for run in runs], dtype=np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)

    def column(values: Sequence[int]) -> Ints:
        return np.repeat(np.array(values, dtype=np.int64), counts)

    return StepBatch(
        size,
        row=column([run.row for run in runs]) + within,
        request=column([run.request for run in runs]),
        position=column([run.position for run in runs]) + within,
        token_id=np.array([token for run in runs for token in run.token_ids], dtype=np.int64),
        prompt_len=column([run.prompt_len for run in runs]),
    )


def whole_sequence(token_ids: Sequence[int], prompt_len: int, request: int = 0) -> StepBatch:
    """One whole sequence as one pass, `[tokens]`."""
    return step_of([Run(request, 0, 0, token_ids, prompt_len)], len(token_ids))


def in_reach(select: SelectSpec | None, prompt: Sequence[int], prompt_len: int, max_tokens: int) -> int:
    """How many rows a selection can come to select: those of the prompt that it does, and all that may be generated.

    >>> in_reach(SelectSpec.read("prompt[-1]"), [5, 6, 7], 3, 9), in_reach(None, [5, 6, 7], 3, 9)
    (1, 11)
    """
    count = int(resolve(select, whole_sequence(prompt, prompt_len)).sum())
    generates = select is None or "generation" in select.phases
    return count + (max_tokens - 1 if generates else 0)


def check_rows(position: Ints, token_id: Ints, rows: StepBatch, select: SelectSpec | None) -> None:
    """CaptureError unless some rows are those that are selected of a sequence, of its tokens (−1: unknown)."""
    wanted = np.flatnonzero(resolve(select, rows))
    if not np.array_equal(position, wanted):
        raise CaptureError(f"{len(wanted)} rows were selected, and {len(position)} came")
    if ((token_id >= 0) & (token_id != rows.token_id[position])).any():
        raise CaptureError("a row consumed another token than its label says")


def check_fired(fired: set[tuple[Site, int]], place: tuple[Site, int], size: int, expected: int) -> None:
    """Note that a tap fired in a pass; CaptureError for one with other rows than the pass, or that fires again."""
    if size != expected or place in fired:
        what = "fired twice in one pass" if size == expected else f"has {size} rows, not {expected}"
        raise CaptureError(f"{place[0]} at layer {place[1]} {what}")
    fired.add(place)


def resolve_each(specs: Sequence[SelectSpec | None], which: Ints, rows: StepBatch) -> NDArray[np.bool_]:
    """Which rows are selected, `[rows]`, where each row has a spec of its own: `which`, `[rows]`, of `specs`."""
    found = np.ones(len(which), dtype=np.bool_)
    for place in np.unique(which):
        of = which == place
        found[of] = resolve(specs[int(place)], rows.take(of))
    return found
