"""What the rows of a pass are, from vLLM's model runner V1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from midstream.taps.step import StepBatch


def step_batch(runner: Any, size: int, number_of: Mapping[str, int], prompt_len: Callable[[int], int]) -> StepBatch:
    """The rows of requests that have wishes, in the pass that the runner has prepared; size: its flat rows, padded.

    number_of: the engine's request id → our number of it.
    """
    batch = runner.input_batch
    count = batch.num_reqs
    numbers = np.array([number_of.get(req_id, -1) for req_id in batch.req_ids[:count]], dtype=np.int64)
    mine = np.flatnonzero(numbers >= 0)
    starts = runner.query_start_loc.np[: count + 1].astype(np.int64)
    lengths = np.diff(starts)[mine]
    first = batch.num_computed_tokens_cpu[:count][mine].astype(np.int64)
    return rows_of(
        size,
        numbers[mine],
        starts[:-1][mine],
        lengths,
        first,
        np.array([prompt_len(int(number)) for number in numbers[mine]], dtype=np.int64),
        lambda position: batch.token_ids_cpu[np.repeat(mine, lengths), position],
    )


def rows_of(
    size: int,
    numbers: np.ndarray[Any, np.dtype[np.int64]],
    starts: np.ndarray[Any, np.dtype[np.int64]],
    lengths: np.ndarray[Any, np.dtype[np.int64]],
    first: np.ndarray[Any, np.dtype[np.int64]],
    prompt_lens: np.ndarray[Any, np.dtype[np.int64]],
    tokens: Callable[[np.ndarray[Any, np.dtype[np.int64]]], Any],
) -> StepBatch:
    """Runs of rows, one per request: where each starts, how long it is, and its first position."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    position = np.repeat(first, lengths) + within
    return StepBatch(
        size,
        row=np.repeat(starts, lengths) + within,
        request=np.repeat(numbers, lengths),
        position=position,
        token_id=np.asarray(tokens(position), dtype=np.int64),
        prompt_len=np.repeat(prompt_lens, lengths),
    )
