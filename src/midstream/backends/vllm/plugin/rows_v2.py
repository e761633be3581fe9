"""What the rows of a pass are, from the InputBatch of vLLM's model runner V2. Not run here: V2 wants Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from midstream.taps.step import StepBatch

from .rows_v1 import rows_of


def step_batch(
    batch: Any,
    size: int,
    number_of: Mapping[str, int],
    prompt_len: Callable[[int], int],
    known_ids: Callable[[int], Sequence[int]],
) -> StepBatch:
    """The rows of requests that have wishes, in a pass over `batch`; size: its flat rows, padded.

    Ids that were just sampled are on the device alone: `known_ids` has those that the engine has told us (the
    prompt's), and a row past them has the id −1, which its reader replaces by what was generated.
    """
    numbers = np.array([number_of.get(req_id, -1) for req_id in batch.req_ids[: batch.num_reqs]], dtype=np.int64)
    mine = np.flatnonzero(numbers >= 0)
    starts = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
    lengths = np.diff(starts)[mine]

    def tokens(position: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        of = np.repeat(numbers[mine], lengths)
        out = np.full(len(position), -1, dtype=np.int64)
        for number in numbers[mine]:
            ids = np.asarray(known_ids(int(number)), dtype=np.int64)
            known = np.flatnonzero((of == number) & (position < len(ids)))
            out[known] = ids[position[known]]
        return out

    return rows_of(
        size,
        numbers[mine],
        starts[:-1][mine],
        lengths,
        batch.num_computed_tokens_np[: batch.num_reqs][mine].astype(np.int64),
        np.array([prompt_len(int(number)) for number in numbers[mine]], dtype=np.int64),
        tokens,
    )
