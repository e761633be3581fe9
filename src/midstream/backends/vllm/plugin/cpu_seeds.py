"""Seeded requests whose prompt comes in chunks, on a CPU.

A step that does not end a prompt samples a token that is thrown away; vLLM then turns the request's generator back by
an offset, which a CPU's generator has not: the engine dies of it. Here its state is kept instead, and put back.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def attach(runner: Any) -> None:
    """Mend runner V1 on a CPU; it leaves every other as it is."""
    if runner.device.type != "cpu" or not hasattr(runner, "_bookkeeping_sync"):
        return
    sample, keep_books = runner._sample, runner._bookkeeping_sync

    def thrown_away() -> dict[int, Any]:
        batch = runner.input_batch
        if not batch.generators:
            return {}
        places = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        return {place: batch.generators[place] for place in places if place in batch.generators}

    def _sample(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in thrown_away().values()]
        try:
            return sample(*args, **kwargs)
        finally:
            for generator, state in states:
                generator.set_state(state)

    def _bookkeeping_sync(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        turned_back = thrown_away()
        for place in turned_back:
            del generators[place]
        try:
            return keep_books(*args, **kwargs)
        finally:
            generators.update(turned_back)

    runner._sample, runner._bookkeeping_sync = _sample, _bookkeeping_sync
