"""What came of a request that taps had to do with, once its tokens are known: receipts, and its rows."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch

from midstream.core.artifacts import Artifact
from midstream.core.binding import BoundOp
from midstream.core.capture import CaptureReceipt
from midstream.core.errors import EngineError, MidstreamError
from midstream.core.interventions import OpReceipt
from midstream.core.sites import Site, SiteLayout
from midstream.formats.activations import Activations
from midstream.taps.step import StepBatch, check_rows, whole_sequence

from ..calls import op_receipts
from ..requests import EngineRequest
from ..rows import Collected, Segmented, error_of
from .engine import AsyncEngine
from .gathering import gathered


@dataclass(frozen=True, eq=False)
class Tapped:
    """A request that taps have to do with. request: what travels with it to the workers, under an id of ours.

    ops: its steering, bound to the model. layouts: what is captured.
    """

    request: EngineRequest
    ops: tuple[BoundOp, ...]
    layouts: Mapping[Site, Mapping[int, SiteLayout]]

    @property
    def artifacts(self) -> Mapping[str, Artifact]:
        """The tensors of its spec, by id."""
        return {} if self.request.steering is None else self.request.steering.artifacts()


@dataclass(frozen=True, eq=False)
class Settled:
    """What was done to a request. cached: how many rows came from the prefix cache. decided: by its gates.

    parts: of every rank, what it says of the rows that are captured. rows: its sequence.
    """

    cached: int
    steering: tuple[OpReceipt, ...]
    decided: Mapping[str, bool]
    parts: Sequence[Collected]
    rows: StepBatch


class Settling:
    """Of one engine. dtype: what its model computes in."""

    def __init__(self, engine: AsyncEngine, dtype: torch.dtype) -> None:
        self._engine, self._dtype = engine, dtype
        self._segmented = Segmented(engine.facts.folders)
        self._gathering = Lock()  # in threads

    @asynccontextmanager
    async def settled(self, tapped: Tapped, prompt: Sequence[int], generated: Sequence[int]) -> AsyncGenerator[Settled]:
        """What was done to a request that has ended; its rows are there while this is open.

        CaptureError: it failed, or a row was not steered; EngineError: the engine has died.
        """
        request = tapped.request
        try:
            parts = await self._engine.collect(request.id)
            for part in parts:
                if (error := error_of(part.described[0])) is not None:
                    raise error
            described: Mapping[str, Any] = parts[0].described[0]
            rows = whole_sequence([*prompt, *generated[:-1]], request.prompt_len or len(prompt))
            steering = op_receipts(tapped.ops, rows, described, "the request")
            yield Settled(int(described["cached"]), steering, described["decided"], parts, rows)
        except MidstreamError as error:
            if tapped.ops and not isinstance(error, EngineError):
                # what a steer should have done is a part of its blocks' keys, and was not done to these
                await self._forget_blocks()
            raise
        finally:
            self._engine.release(request.id)

    async def _forget_blocks(self) -> None:
        """Empty the prefix cache: requests that run are preempted for it, else it would refuse."""
        while not await self._engine.client.reset_prefix_cache(reset_running_requests=True):
            await asyncio.sleep(0.05)

    async def activations(self, tapped: Tapped, settled: Settled) -> Activations:
        """What was captured: every row that was selected, in tensors of its own."""
        return await asyncio.to_thread(self._activations, tapped, settled)

    def _activations(self, tapped: Tapped, settled: Settled) -> Activations:
        capture, parts, rows = tapped.request.capture, settled.parts, settled.rows
        assert capture is not None
        kept = parts[0].position < len(rows)  # an engine may run a step too far
        position = parts[0].position[kept]
        check_rows(position, parts[0].token_id[kept], rows, capture.select)
        with self._gathering:
            stacks = gathered(parts, kept, self._segmented, tapped.layouts, self._dtype)
            self._segmented.forget_removed()
        overflowed = sum(int(part.overflowed[kept].sum()) for part in parts if len(part.overflowed))
        receipt = CaptureReceipt(len(position), len(position), 0, overflowed)
        generated = position >= rows.prompt_len[0] if len(rows) else np.zeros(0, dtype=np.bool_)
        return Activations(stacks, position, rows.token_id[position], generated, receipt)
