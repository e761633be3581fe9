"""What was done to the rows of one cache block: a part of its key, here and in the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from midstream.core.interventions import InterventionSpec, acts_on
from midstream.taps.step import Run, StepBatch, step_of


def block_key(spec: InterventionSpec, rows: StepBatch) -> str | None:
    """What was done to the rows of one block, whose predecessors' keys are part of its own; None: nothing.

    A gate's decision follows from the spec and the prompt, and the chain of keys covers the prompt up to its end.
    """
    touched: list[Any] = []
    for op in spec.ops:
        if op.silent:
            continue
        positions = rows.position[acts_on(op, rows)].tolist()
        if positions:
            content = {name: value for name, value in op.canonical().items() if name != "scope"}
            before = None if op.gate is None else [int(rows.prompt_len[0]), spec.digest]
            touched.append([content, positions, before])
    if not touched:
        return None
    return sha256(json.dumps(touched, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def block_rows(ids: Sequence[int], start: int, prompt_len: int) -> StepBatch:
    """The rows of one block, whose first position is `start`."""
    return step_of([Run(0, 0, start, ids, prompt_len)], len(ids))


def chain(
    ids: Sequence[int], prompt_len: int, size: int, spec: InterventionSpec | None, salt: str | None
) -> Iterator[str]:
    """A key for each whole block of `size` rows, which holds all before it and what was done there.

    >>> one, two = (list(chain(ids, 4, 2, None, None)) for ids in ([1, 2, 3, 4], [1, 2, 3, 5]))
    >>> one[0] == two[0], one[1] == two[1]
    (True, False)
    """
    before = sha256(repr(salt).encode()).hexdigest()
    for start in range(0, len(ids) - size + 1, size):
        block = [int(token) for token in ids[start : start + size]]
        done = None if spec is None else block_key(spec, block_rows(block, start, prompt_len))
        before = sha256(json.dumps([before, block, done]).encode()).hexdigest()
        yield before
