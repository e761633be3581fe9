"""What is added to the answer of a completion that asked for something: its rows, and what was done to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from threading import Lock
from typing import Any

import numpy as np
import torch

from midstream.core.artifacts import Artifact
from midstream.core.binding import BoundOp, bind
from midstream.core.capture import CaptureReceipt, CaptureSpec
from midstream.core.errors import CaptureError, MidstreamError, spec_error
from midstream.core.interventions import OpReceipt
from midstream.core.select import resolve
from midstream.core.sites import Site, SiteLayout, layouts_at, site_layers
from midstream.formats.activations import Activations, held_form
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.wire import encode_tensor
from midstream.taps.step import StepBatch, whole_sequence

from ..calls import op_receipts
from ..requests import EngineRequest
from ..rows import Collected, Segmented, error_of
from .engine import AsyncEngine
from .gathering import gathered
from .held import Held
from .wishes import Asked, OwnWishes

ADDED = "midstream"
"""The field of an answer that says what was done, whatever was asked."""
_EVERY_ROW = "residual_stream"


@dataclass(frozen=True, eq=False)
class Wished:
    """One completion that asks for something. id: ours, under which its rows are. layouts: what is captured."""

    id: str
    asked: Asked
    ops: tuple[BoundOp, ...]
    artifacts: Mapping[str, Artifact]
    layouts: Mapping[Site, Mapping[int, SiteLayout]]

    @property
    def tapped(self) -> bool:
        """Whether taps have anything to do with it."""
        return self.asked.capture is not None or self.asked.steering is not None

    def request(self) -> EngineRequest:
        """What travels with it to the workers."""
        own = self.asked.own
        return EngineRequest(
            id=self.id,
            prompt_len=own.prompt_len or 0,
            capture=self.asked.capture,
            steering=self.asked.steering,
            decided=own.decided,
        )


class Answering:
    """Of one engine. dtype: what its model computes in."""

    def __init__(self, engine: AsyncEngine, held: Held, registry: ArtifactRegistry, dtype: torch.dtype) -> None:
        self.engine, self.held, self.registry = engine, held, registry
        self._dtype = dtype
        self._segmented = Segmented(engine.facts.folders)
        self._gathering = Lock()  # answers are made in threads

    # --- on the way in

    def begin(self, asked: Asked) -> Wished:
        """Check against the model what is asked; SpecError names what is wrong."""
        facts = self.engine.facts
        layouts = {} if asked.capture is None else self._layouts(asked.capture)
        if asked.steering is None:
            return Wished(secrets.token_hex(16), asked, (), {}, layouts)
        asked.steering.canonical_json()
        ops = bind(asked.steering, facts.layouts, facts.refused, self.registry.get)
        return Wished(secrets.token_hex(16), asked, ops, asked.steering.artifacts(), layouts)

    def check(self, wishes: EngineRequest, prompt: Sequence[int], max_tokens: int) -> None:
        """What can be said once a prompt's tokens are there: SpecError for a capture that is too large to hold."""
        if wishes.prompt_len > len(prompt):
            message = f"is {wishes.prompt_len}, of a prompt of {len(prompt)} tokens"
            raise spec_error("E_BAD_PARAM", f"{OwnWishes.root}.prompt_len", message)
        if (capture := wishes.capture) is None:
            return
        rows = whole_sequence(prompt, wishes.prompt_len or len(prompt))
        count = int(resolve(capture.select, rows).sum())
        if capture.select is None or "generation" in capture.select.phases:
            count += max(max_tokens - 1, 0)
        size = self._row_bytes(capture, self._layouts(capture))
        if count * size > self.held.max_bytes:
            message = f"{count} rows of {size:,} bytes; this server holds {self.held.max_bytes:,} bytes, "
            raise spec_error("E_BAD_PARAM", "capture", f"{message}or {self.held.max_bytes // size} such rows")

    # --- on the way out

    async def finish(self, wished: Wished, prompt: Sequence[int], generated: Sequence[int]) -> dict[str, Any]:
        """The fields of an answer whose tokens are known. CaptureError: a row did not come, or was not steered."""
        if not wished.tapped:
            return self._added({"cached": 0, "decided": {}}, ())
        try:
            parts = await self.engine.collect(wished.id)
            described = parts[0].described[0]
            for part in parts:
                if (error := error_of(part.described[0])) is not None:
                    raise error
            rows = whole_sequence([*prompt, *generated[:-1]], wished.asked.own.prompt_len or len(prompt))
            own = np.ones(len(rows), dtype=np.bool_)
            steering = op_receipts(wished.ops, rows, own, described, "the request") if wished.ops else ()
            added = self._added(described, steering)
            if wished.asked.capture is not None:
                added["activations"] = await self._activations(wished, parts, rows)
            return added
        except MidstreamError:
            if wished.ops:  # what a steer should have done is a part of its blocks' keys, and was not done to these
                await self._forget_blocks()
            raise
        finally:
            self.engine.release(wished.id)

    def _added(self, described: Mapping[str, Any], steering: Sequence[OpReceipt]) -> dict[str, Any]:
        return {
            ADDED: {
                "model_fingerprint": self.engine.facts.fingerprint,
                "cached": int(described["cached"]),
                "steering": [_finite(asdict(one)) for one in steering],
                "decided": described["decided"],
            }
        }

    async def _forget_blocks(self) -> None:
        """Empty the prefix cache: requests that run are preempted for it, else it would refuse."""
        while not await self.engine.client.reset_prefix_cache(reset_running_requests=True):
            await asyncio.sleep(0.05)

    async def _activations(self, wished: Wished, parts: Sequence[Collected], rows: StepBatch) -> dict[str, Any]:
        """What was captured, in the form and by the way that was asked for; room is taken before it is made."""
        asked = wished.asked
        assert asked.capture is not None
        room = len(parts[0].position) * self._row_bytes(asked.capture, wished.layouts)
        await self.held.take(room)
        kept = False
        try:
            found = await asyncio.to_thread(self._captured, wished, parts, rows)
            handles: list[str] | None = None
            if asked.binary:
                handles = await self.held.keep([stack.tensor for stack in found.stacks], room)
                kept = True
            if not asked.residual:
                return await asyncio.to_thread(found.plain, handles)
            (stack,) = found.stacks
            if handles is not None:
                return {_EVERY_ROW: held_form(stack.tensor, handles[0])}
            return {_EVERY_ROW: await asyncio.to_thread(encode_tensor, stack.tensor)}
        finally:
            if not kept:
                await self.held.give_up(room)

    def _layouts(self, capture: CaptureSpec) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """What a capture is of; SpecError for what this model has not."""
        facts = self.engine.facts
        return layouts_at(site_layers(capture.sites, capture.layers, facts.layouts, facts.refused), facts.layouts)

    def _row_bytes(self, capture: CaptureSpec, layouts: Mapping[Site, Mapping[int, SiteLayout]]) -> int:
        """What a row takes, over all sites and layers."""
        kind = getattr(torch, capture.dtype) if capture.dtype else self._dtype
        return sum(layout.width for of in layouts.values() for layout in of.values()) * kind.itemsize

    def _captured(self, wished: Wished, parts: Sequence[Collected], rows: StepBatch) -> Activations:
        """The rows of one completion, each of which was selected."""
        capture, first = wished.asked.capture, parts[0]
        assert capture is not None
        kept = first.position < len(rows)  # an engine may run a step too far
        position = first.position[kept]
        wanted = np.flatnonzero(resolve(capture.select, rows))
        if not np.array_equal(position, wanted):
            raise CaptureError(f"{len(wanted)} rows were selected, and {len(position)} came")
        known = first.token_id[kept]
        if ((known >= 0) & (known != rows.token_id[position])).any():
            raise CaptureError("a row consumed another token than its label says")
        with self._gathering:
            stacks = gathered(parts, kept, self._segmented, wished.layouts, self._dtype)
            self._segmented.forget_removed()
        overflowed = sum(int(part.overflowed[kept].sum()) for part in parts if len(part.overflowed))
        receipt = CaptureReceipt(len(wanted), len(position), 0, overflowed)
        generated = position >= rows.prompt_len[0] if len(rows) else np.zeros(0, dtype=np.bool_)
        return Activations(stacks, position, rows.token_id[position], generated, receipt)

    def give_up(self, wished: Wished) -> None:
        """Nobody waits for a request any more."""
        if wished.tapped:
            self.engine.release(wished.id)


def _finite(receipt: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, which a row may have had."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value for name, value in receipt.items()
    }
